"""The command `keyhole`: its commands, and the one place where an error becomes a sentence and an exit code.

    0 done     1 a finding failed     2 the input was wrong     130 interrupted

Nothing here or in a command's file imports torch, pydantic or transformers before the command runs: help is quick.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from keyhole.cli import audit, doctor, evaluate, export, importing, parts, report, runs, sample, search, study, train
from keyhole.cli.output import answers, json_alone, print_json
from keyhole.core.errors import KeyholeError, RunStopped, nearest

INTERRUPTED = 130


def _flag(option: Any) -> Any:
    """The option --help, without typer's note that a flag is a boolean."""
    if option is not None:
        option.metavar = ""
    return option


class _Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _flag(super().get_help_option(ctx))


class _Commands(TyperGroup):
    """The commands; who stops reading our output (`| head`) has had enough, and that is no error."""

    def get_help_option(self, ctx: Any) -> Any:
        return _flag(super().get_help_option(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _mute()
            raise typer.Exit(0) from None


app = typer.Typer(
    cls=_Commands,
    name="keyhole",
    help="The attention laboratory: train, open and honestly compare attention models.",
    epilog="Begin with: keyhole train recipes/first.toml",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = {
    "train": train.train,
    "eval": evaluate.evaluate,
    "sample": sample.sample,
    "audit": audit.audit,
    "study": study.study,
    "search": search.search,
    "report": report.report,
    "runs": runs.runs,
    "parts": parts.parts,
    "export": export.export,
    "import": importing.import_folder,
    "doctor": doctor.doctor,
}
EXAMPLES = {
    "train": "keyhole train recipes/first.toml --set train.steps=200",
    "eval": 'keyhole eval runs/first --text "An expression is" --text "qzx"',
    "sample": 'keyhole sample runs/first --prompt "The " --temperature 0.7',
    "audit": "keyhole audit my.py:Mine --no-canary",
    "study": "keyhole study recipes/studies/founding.toml",
    "search": "keyhole search recipes/searches/rate-and-optimizer.toml --trials 30",
    "report": "keyhole report runs/founding --html founding.html",
    "runs": 'keyhole runs runs --where "dev_loss<1.5" --sort dev_loss',
    "parts": "keyhole parts merge",
    "export": "keyhole export runs/first exported/first",
    "import": "keyhole import exported/first runs/again",
    "doctor": "keyhole doctor",
}
for _name, _command in COMMANDS.items():
    app.command(_name, cls=_Command, epilog=f"Example: {EXAMPLES[_name]}")(_command)


def _version(asked: bool) -> None:
    if asked:
        from keyhole import __version__

        typer.echo(f"keyhole {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    try:
        code = run(sys.argv[1:])
    except SystemExit as ended:  # a process that leaves because another one has said why
        code = ended.code if isinstance(ended.code, int) else 1
    if "keyhole.training.parallel" not in sys.modules:
        sys.exit(code)
    from keyhole.training.parallel import end_process

    end_process(code)


def run(arguments: list[str]) -> int:
    """Carry out one command line; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sign shows a question mark, rather than end the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = _carry_out(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _mute()
        code = 0
    finally:
        _part()
    return code


def _carry_out(arguments: list[str]) -> int:
    try:
        with json_alone() if "--json" in arguments else nullcontext():
            code = app(args=arguments or ["--help"], prog_name="keyhole", standalone_mode=False)
    except TyperException as error:
        return _tell(arguments, _usage(arguments, error), 2)
    except KeyholeError as error:
        return _tell(arguments, str(error), error.exit_code, error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        return _tell(arguments, f"{error.filename or 'the system'}: {error.strerror or error}", 2)
    except (RuntimeError, MemoryError) as error:
        if (sentence := _known(error)) is None:
            raise
        return _tell(arguments, sentence, 2)
    if code == INTERRUPTED:
        return _tell(arguments, "interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _tell(arguments: list[str], message: str, code: int, error: KeyholeError | None = None) -> int:
    """One sentence on stderr, and with --json an object on stdout; the process that writes speaks for all."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not _together():
        _let_process_0_speak()
        return code
    who = "keyhole" if rank == "0" else f"keyhole (process {rank})"
    typer.echo(f"{who}: {message}", err=True)
    if "--json" in arguments and rank == "0":
        found = {"finding": error.finding.to_dict()} if isinstance(error, RunStopped) else {}
        print_json({"error": message, "exit_code": code, **found})
    return code


def _let_process_0_speak() -> None:
    """All processes fail alike before they have met, and process 0 says why.

    torchrun ends the others as soon as one has failed, so this one waits for that, a few seconds at the most: it may be
    that only here something is missing.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigtimedwait({signal.SIGTERM}, 5)


def _usage(arguments: list[str], error: TyperException) -> str:
    """What is wrong with the command line, as one sentence in our own form."""
    message = error.format_message().replace("\n", " ").strip().rstrip(".")
    words = [word for word in arguments if not word.startswith("-")]
    if words and words[0] not in COMMANDS:
        return f"there is no command {words[0]!r}{nearest(words[0], COMMANDS)}; see keyhole --help"
    option = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    for pattern, kind in (("valid integer", "a whole number"), ("valid number", "a number")):
        if pattern in message and option in arguments[:-1]:
            message = f"{option} {arguments[arguments.index(option) + 1]!r} is not valid; it takes {kind}"
    message = message[:1].lower() + message[1:]
    return f"{message}; see {' '.join(['keyhole', *words[:1]])} --help"


def _known(error: RuntimeError | MemoryError) -> str | None:
    """A sentence for failures that are the machine's, not ours."""
    text = str(error)
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return "there is not enough memory; lower train.batch or data.block, or cut the batch with train.accumulate"
    if os.environ.get("WORLD_SIZE", "1") != "1" and "onnect" in text:
        return "the other processes are gone; the first one to stop says why"
    return None


def _mute() -> None:
    """Nobody reads stdout any more: let what is still to be flushed go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, answers().fileno())


def _together() -> bool:
    """Whether this process has met the others of a torchrun."""
    if "keyhole.training.parallel" not in sys.modules:
        return False
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def _part() -> None:
    """Leave the other processes of a torchrun, where there are any."""
    if _together():
        from keyhole.training.parallel import leave_world

        leave_world()
