"""What the log says of a device's jobs, under the ids that the device gave them."""

from drumline.model.errors import DrumlineError, InvalidRequest
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.codec import ResultMessage, parse_submit
from drumline.scheduler.mqtt.running import Running
from drumline.scheduler.reporting import without_text


def job_event(name: str, running: Running, **fields: object) -> Event:
    """An event of one job."""
    client, job_id = running.key
    return Event(name, job=job_id, client=client, **fields)


def job_ended(running: Running, outcome: ResultMessage, show_text: bool) -> Event:
    """The one terminal event of an accepted job; times in seconds from when the engine got it."""
    usage, timings = outcome.usage, outcome.timings
    return job_event(
        "job ended",
        running,
        outcome=outcome.status,
        stop_reason=outcome.stop_reason,
        prompt_tokens=usage and usage.prompt_tokens,
        tokens=usage and usage.generated_tokens,
        queued_s=timings and timings.queued_s,
        first_token_s=timings and timings.first_token_s,
        total_s=timings and timings.total_s,
        error=outcome.error and outcome.error.message,
        prompt=_prompt(running.body) if show_text else None,
        text=outcome.text if show_text else None,
    )


def job_rejected(client: str, job_id: str | None, reason: str, error: DrumlineError) -> Event:
    """A job, or what should have been one, that was never accepted."""
    field = error.field if isinstance(error, InvalidRequest) else None
    return Event("job rejected", job=job_id, client=client, reason=reason, field=field, error=without_text(error))


def _prompt(body: bytes) -> str | None:
    try:
        submit = parse_submit(body, len(body))
    except InvalidRequest:  # an older journal's; what is told of a job must not end it
        return None
    if submit.messages is None:
        return submit.prompt
    return "\n".join(f"{message.role}: {message.content}" for message in submit.messages)
