"""`kvrt ask`: questions after the text of a session, or after chunks that were computed alone."""

from kvrt.cli.ask.chunk_ask import ask_chunks
from kvrt.cli.ask.session_ask import ask_session
from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.run import prompt
from kvrt.errors import UsageError


def execute(options: AskOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from starting, or ended it; answers so far are written.
    """
    if options.schema is not None:
        from kvrt.cli.schema import serve

        return serve.execute(options)
    questions = _questions(options)
    return (ask_chunks if options.chunk else ask_session)(options, questions)


def _questions(options: AskOptions) -> list[str]:
    if options.question is not None:
        found = [options.question]
    else:
        assert options.questions is not None
        found = prompt.read_text("-F", options.questions).splitlines()
    found = [q.strip() for q in found if q.strip()]
    if not found:
        raise UsageError("the question is empty; give at least one character")
    return found
