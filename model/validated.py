"""The base of everything a user fills in: frozen, strict, and wrong fields raise `InvalidRequest`."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from drumline.model.errors import InvalidRequest


class Validated(BaseModel):
    """A frozen pydantic model whose validation errors are `InvalidRequest`, which names the field and its limit."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
    )

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _invalid_request(error) from None

    @classmethod
    def model_validate(cls, *arguments: Any, **options: Any) -> Self:
        """pydantic's own, with our error."""
        try:
            return super().model_validate(*arguments, **options)
        except ValidationError as error:
            raise _invalid_request(error) from None

    @classmethod
    def from_json(cls, payload: str | bytes) -> Self:
        """Parse one JSON object; raises `InvalidRequest` for bad UTF-8, bad JSON and bad fields alike."""
        try:
            return cls.model_validate_json(payload)
        except ValidationError as error:
            raise _invalid_request(error) from None


def _invalid_request(error: ValidationError) -> InvalidRequest:
    """The first complaint, with the dotted name of its field (a nested model brings its own field name)."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return InvalidRequest(".".join([*path, cause.field]), cause.limit)
    return InvalidRequest(".".join(path) or "request", first["msg"])
