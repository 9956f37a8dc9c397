"""How `accelerate config` asks its questions in a terminal, and the form of its help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import UsageError

if TYPE_CHECKING:
    from questionary import Question as Prompt

    from accelerate.config.questions import Interview, Question

DYNAMO_BACKENDS = [
    "EAGER",
    "AOT_EAGER",
    "INDUCTOR",
    "AOT_TS_NVFUSER",
    "NVPRIMS_NVFUSER",
    "CUDAGRAPHS",
    "OFI",
    "FX2TRT",
    "ONNXRT",
    "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE",
    "TORHCHXLA_TRACE_ONCE",  # as programs know it
    "TVM",
]

BACK = object()
"""The answer that takes the previous one back."""

FILE_HELP = "The file; the default one is in the cache folder of Hugging Face."
KEYS = "Arrow keys choose, Enter answers, Shift-Tab goes back, Ctrl-C leaves without writing."


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leave the placeholder of the sub-commands out of the usage line."""

    def _format_usage(self, usage, actions, groups, prefix):  # type: ignore[no-untyped-def]
        text = super()._format_usage(usage, actions, groups, prefix)
        return text.replace("<command> [<args>] ", "")


def add_subcommand(
    subparsers: Any, parents: Any, name: str, text: str, function: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:
    """Add the parser of a sub-command of `accelerate config`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, parents=parents, help=text, formatter_class=SubcommandHelpFormatter
    )
    parser.set_defaults(func=function)
    return parser


def check_terminal() -> None:
    """Refuse to ask where nobody can answer.

    Raises:
        UsageError: Input or output is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "`accelerate config` asks questions, and input or output is no terminal here. Run `accelerate config default "
            "--config_file FILE`, which asks nothing, or give the options to `accelerate launch` as flags."
        )


def ask_all(interview: Interview) -> bool:
    """Ask until all questions are answered; a step back asks the previous one again.

    Returns:
        False if the user stepped back from the first question.

    Raises:
        UsageError: Input or output is no terminal.
        KeyboardInterrupt: The user has left.
    """
    check_terminal()
    while (question := interview.current()) is not None:
        answer = _ask(question, interview.offered(), interview.values)
        if answer is not BACK:
            interview.answer(answer)
        elif not interview.back():
            return False
    return True


def ask_answers(interview: Interview) -> dict[str, Any]:
    """Ask until all questions are answered and return the answers; before the first question there is nothing to go to."""
    while not ask_all(interview):
        continue
    return interview.answers


def _ask(question: Question, offered: Any, answers: dict[str, Any]) -> Any:
    """Ask one question and return the answer, or `BACK`."""
    if question.choices:
        return choose(question.text, question.choices, offered)

    def validate(text: str) -> bool | str:
        try:
            question.read(text, answers)
        except ValueError as error:
            return str(error)
        return True

    prompt = _questionary().text(
        f"{question.text}:",
        default=question.shown(offered),
        validate=validate,
        qmark="?",
        instruction="(may stay empty)" if question.optional else None,
    )
    text = _run(prompt)
    return BACK if text is BACK else question.read(text, answers)


def choose(text: str, choices: tuple[tuple[Any, str], ...], offered: Any) -> Any:
    """Let the user choose with the arrow keys and return the value, or `BACK`."""
    questionary = _questionary()
    # By number: values may be empty or false, which the library takes for none.
    listed = [questionary.Choice(label, value=str(index)) for index, (_, label) in enumerate(choices)]
    start = next((entry for entry, (value, _) in zip(listed, choices, strict=True) if value == offered), listed[0])
    # An empty instruction would be replaced by the library's own.
    chosen = _run(questionary.select(f"{text}:", listed, default=start, instruction=" ", qmark="?"))
    return BACK if chosen is BACK else choices[int(chosen)][0]


def _questionary() -> Any:
    from accelerate._base.imports import require

    return require("questionary", why="`accelerate config` asks its questions with it")


def _run(prompt: Prompt) -> Any:
    """Show a prompt whose Shift-Tab returns `BACK`."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()

    @keys.add(Keys.BackTab, eager=True)
    def _(event: KeyPressEvent) -> None:
        # The question that is left unanswered goes from the screen.
        event.app.erase_when_done = True
        event.app.exit(result=BACK)

    application = prompt.application
    present = [application.key_bindings] if application.key_bindings is not None else []
    application.key_bindings = merge_key_bindings([*present, keys])
    return prompt.unsafe_ask()
