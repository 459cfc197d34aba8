"""The commands, one module each."""

import typer

from drumline.scheduler.cli import bench, demo, generate, journal, ledger, profile, serve, submit, top, trace, verify

app = typer.Typer(
    name="drumline",
    help="Batched generation for small language models: asyncio, MQTT, Prometheus.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("submit")(submit.submit)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("verify")(verify.verify)
app.command("ledger")(ledger.ledger)
app.command("profile")(profile.profile)
app.command("top")(top.top)
app.command("trace")(trace.trace)
app.add_typer(journal.app, name="journal")
