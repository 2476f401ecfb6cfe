"""The pages of docs/reference, made from the code: commands, the same as a man page, job file, metrics, errors; and the
table of docs/plan-a-run.md.

`python -m tests.support.references` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer
from prometheus_client import CollectorRegistry

from client.cli import ALIASES, VERBS, app
from client.verbs.example import commented_job
from scheduler.metrics import SchedulerMetrics
from stage_server.metrics import StageServerMetrics
from swarm.errors import ERROR_BY_CODE
from swarm.job.footprint import memory_by_stages
from swarm.job.spec import JobSpec
from swarm.process.lifecycle import SECRET_FLAGS
from swarm.relay.metrics import RelayMetrics
from tests.support.llamas import SHAPES, resolved

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_NOTE = "<!-- Made from the code: `make references`. Do not edit. -->"


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", _NOTE, *parts]) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in line) + " |" for line in lines
    )


# Commands -------------------------------------------------------------------------------------------------------------

_COMMANDS = """\
The flags of the first table go before or after every command but the programs (`scheduler`, `stage-server`, `relay`,
`train-local`, `plan`, `simulate`). Where a variable of the environment is named, it stands in for the flag; a flag
wins."""


def _command(verb: str) -> Any:
    """The command behind a verb, with none but its own flags."""
    entry = VERBS[verb]
    if entry.program:
        return typer.main.get_command(import_module(f"{entry.module}.__main__").cli)
    one = typer.Typer(add_completion=False, rich_markup_mode=None)
    one.command(verb)(getattr(import_module(entry.module), verb))
    return typer.main.get_command(one)


def flags_of(verb: str) -> frozenset[str]:
    """All flags that may follow a verb. KeyError: there is no such verb."""
    entry = VERBS[ALIASES.get(verb, verb)]
    shared = [] if entry.program else typer.main.get_command(app).params
    both = [*_command(ALIASES.get(verb, verb)).params, *shared]
    return frozenset({"-h", "--help"}.union(*(flag.opts + flag.secondary_opts for flag in both)))


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = parameter.default
    return (
        "" if parameter.show_default is False or value in (None, False, "", (), []) or callable(value) else f"`{value}`"
    )


def _flags(command: Any, *, served: bool = False) -> str:
    """The table of a command's flags; `served`: all can be set in the environment."""
    rows = []
    for flag in command.params:
        if getattr(flag, "hidden", False) or flag.name == "help":
            continue
        is_option = flag.param_type_name == "option"
        names = [*flag.opts, *flag.secondary_opts] if is_option else [flag.metavar or flag.name]
        named = ", ".join(f"`{name}`" for name in names) + (f" {flag.metavar}" if is_option and flag.metavar else "")
        variable = flag.envvar or (f"SWARM_{flag.name.upper()}" if served else "")
        variables = [variable, f"{variable}_FILE"] if served and flag.name in SECRET_FLAGS else [variable]
        told = ", ".join(f"`{variable}`" for variable in variables if variable)
        rows.append((named, _default(flag), told, flag.help or ""))
    return _table(("flag", "default", "environment", "meaning"), rows) if rows else "It takes no flags of its own."


def commands() -> str:
    parts = ["## Flags of all commands", _flags(typer.main.get_command(app))]
    for verb, entry in VERBS.items():
        command = _command(verb)
        served = entry.program and verb != "train-local"
        parts += [f"## swarm {verb}", cleandoc(command.help or entry.words), _flags(command, served=served)]
    return _page("Commands", _COMMANDS, *parts)


# The man page ---------------------------------------------------------------------------------------------------------

_MAN_DESCRIPTION = """\
swarm trains one large model through pools of stage servers on unreliable, unequal machines. A scheduler sends each
microbatch through one stage server per stage; clients submit jobs to it and see what becomes of them."""
_MAN_EXAMPLES = (
    ("swarm up", "Run a broker, a scheduler and 2 x 2 stage servers on this machine."),
    ("swarm submit --example > job.toml", "Write a complete job file with comments."),
    ("swarm submit job.toml", "Send a job and follow it; Ctrl-C stops following, not the job."),
    ("swarm pull example ./model", "Fetch the model of a job as a Hugging Face folder."),
)


def _troff(text: str) -> str:
    """A text as it is, for troff."""
    plain = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    plain = "".join(character if character.isascii() else f"\\[u{ord(character):04X}]" for character in plain)
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


def _troff_flags(command: Any) -> Iterable[str]:
    for flag in command.params:
        if getattr(flag, "hidden", False) or flag.name == "help":
            continue
        is_option = flag.param_type_name == "option"
        names = ", ".join([*flag.opts, *flag.secondary_opts]) if is_option else flag.metavar or flag.name
        value = f" {_troff(flag.metavar)}" if is_option and flag.metavar else ""
        default = _default(flag).strip("`")
        yield ".TP\n" + f"\\fB{_troff(names)}\\fR{value}"
        yield _troff(f"{flag.help or ''}{f' (default: {default})' if default else ''}") or "\\&"


def manual() -> str:
    """The man page swarm(1), which the wheel installs; without a date, so that it changes only with the commands."""
    lines = [
        '.\\" Made from the code: make references. Do not edit.',
        ".TH SWARM 1",
        ".SH NAME",
        "swarm \\- train one large model on unreliable, unequal machines",
        ".SH SYNOPSIS",
        "\\fBswarm\\fR [\\fIFLAG\\fR...] \\fICOMMAND\\fR [\\fIARGUMENT\\fR...]",
        ".SH DESCRIPTION",
        _troff(_MAN_DESCRIPTION),
        ".SH FLAGS OF ALL COMMANDS",
        *_troff_flags(typer.main.get_command(app)),
        ".SH COMMANDS",
    ]
    for verb, entry in VERBS.items():
        command = _command(verb)
        lines += [f".SS swarm {_troff(verb)}", _troff(command.help or entry.words), *_troff_flags(command)]
    kinds: dict[int, list[str]] = {0: ["success"]}
    for code, error in sorted(ERROR_BY_CODE.items()):
        kinds.setdefault(error.exit_code, []).append(code)
    lines.append(".SH EXIT STATUS")
    for status, codes in sorted(kinds.items()):
        lines += [".TP", str(status), _troff(", ".join(codes))]
    lines.append(".SH EXAMPLES")
    for typed, words in _MAN_EXAMPLES:
        lines += [".TP", f"\\fB{_troff(typed)}\\fR", _troff(words)]
    return "\n".join(lines) + "\n"


# The job file ---------------------------------------------------------------------------------------------------------

_JOB_FILE = """\
A job file is TOML. `swarm submit --example` prints the one below with a `data.source` that runs as it is. A key that
does not exist is an error, and so is a value of another type. [job.schema.json](job.schema.json) is its JSON Schema,
for editors."""


def job_file() -> str:
    return _page("The job file", _JOB_FILE, f"```toml\n{commented_job('corpus/**/*.txt')}```")


def job_schema() -> str:
    return json.dumps(JobSpec.model_json_schema(), indent=2) + "\n"


# Metrics --------------------------------------------------------------------------------------------------------------

_METRICS = """\
Every process serves `/metrics` in Prometheus' format, with `process_*` and `python_*` beside what is listed here.
Units are seconds, bytes and tokens; times are Unix seconds. `job_id` stays for an hour after a job has ended, `peer`
until ten minutes after a stage server has left, and 2,000 stage servers at most have series of their own."""


def _series(registry: CollectorRegistry) -> Iterable[tuple[str, str, str, str]]:
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            if family.name.startswith("swarm_"):
                labels = ", ".join(getattr(collector, "_labelnames", getattr(family, "_labelnames", ())))
                name = family.name + ("_total" if family.type == "counter" else "")
                yield f"`{name}`", family.type, labels, family.documentation


def metrics() -> str:
    scheduler, stage_server, relay = SchedulerMetrics("0", 0), StageServerMetrics("0", 0), RelayMetrics("0", 0)
    for process in (scheduler.process, stage_server.process, relay.process):
        process.certificate(lambda: 0.0)
    stage_server.identify("", lambda: None)
    stage_server.watch_links(tuple)
    registries = {
        "Scheduler": scheduler.registry,
        "Stage server": stage_server.registry,
        "Relay": relay.registry,
    }
    head = ("series", "type", "labels", "meaning")
    parts = [part for title, one in registries.items() for part in (f"## {title}", _table(head, sorted(_series(one))))]
    return _page("Metrics", _METRICS, *parts)


# Errors ---------------------------------------------------------------------------------------------------------------

_ERRORS = """\
An error has a code, one sentence with its cause, and mostly a hint with the next command. The exit code of `swarm`
tells the kinds of errors apart; with `-o json` the error is JSON on stdout,
but for programs such as `swarm plan`."""


def errors() -> str:
    rows = (
        (f"`{code}`", str(error.exit_code), (error.__doc__ or "").split("\n\n")[0])
        for code, error in sorted(ERROR_BY_CODE.items())
    )
    return _page("Errors", _ERRORS, _table(("code", "exit code", "what it means"), rows))


# What a model takes ---------------------------------------------------------------------------------------------------

_PLAN = FOLDER / "../plan-a-run.md"
_BEGIN, _END = "<!-- Made from the code: `make references`. -->", "<!-- Made until here. -->"
_LIGHT: dict[str, dict[str, Any]] = {"training": {"microbatch_sequences": 1}, "model": {"recompute": True}}
_ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "defaults": {},
    "microbatches of 1, `recompute = true`": _LIGHT,
    'also `optimizer_on = "host"`': _LIGHT | {"training": _LIGHT["training"] | {"optimizer_on": "host"}},
}


def plan() -> str:
    """The page for those who plan a run, with what the largest of equal stages takes: device + host, in GiB."""
    counts = (1, 2, 4, 8, 16, 32, 64)

    def cells(name: str, sections: dict[str, dict[str, Any]]) -> Iterable[str]:
        needs = memory_by_stages(resolved(name, **sections, pipeline={"overlap": 0}))
        for count in counts:
            need = needs.get(count)
            yield "" if need is None else f"{need.device_bytes / 2**30:.0f} + {need.host_bytes / 2**30:.0f}"

    head = ("model, settings", "1 stage", *map(str, counts[1:]))
    rows = [(f"{name}, {what}", *cells(name, more)) for name in SHAPES for what, more in _ROWS.items()]
    before, rest = _PLAN.read_text().split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{_table(head, rows)}\n\n{_END}{rest.split(_END)[1]}"


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "swarm.1": manual,
    "job-file.md": job_file,
    "job.schema.json": job_schema,
    "metrics.md": metrics,
    "errors.md": errors,
    "../plan-a-run.md": plan,
}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write())
