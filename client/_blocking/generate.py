"""Writes the blocking clients from the asyncio ones, so that there is one client to keep.

Invariants: what is written differs from its source in ``async`` and ``await``, in names, and in words of
docstrings, and says nothing of asyncio. What cannot be the same in both (who drives the socket, how somebody
waits) is written by hand, behind the same names, in ``channel.py`` and ``async_channel.py``.

Run ``python client/_blocking/generate.py`` after a change of a source; with ``--check`` nothing is written,
and the exit status says whether all is up to date.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

CLIENT = Path(__file__).parents[1]
COMMAND = "python client/_blocking/generate.py"
SOURCES = {
    "connection/async_control_client.py": "connection/control_client.py",
    "connection/async_client.py": "connection/scheduler_client.py",
    "trainer/async_driving.py": "trainer/driving.py",
}
"""What is written by hand, and what becomes of it."""
WORDS = {
    "AsyncControlClient": "ControlClient",
    "AsyncGenerationHandle": "GenerationHandle",
    "AsyncSchedulerClient": "SchedulerClient",
    "LoopClient": "ThreadClient",
    "async_channel": "channel",
    "async_control_client": "control_client",
    "async_driving": "driving",
    "``async for`` yields": "Iterating yields",
    "for coroutines of one event loop": "for any number of threads",
}
"""Names, and words of docstrings. unasync knows those of the language, such as ``__aenter__``."""
LEFT_OVER = re.compile(r"[Aa]sync|\bawait\b|[Cc]oroutine|[Ee]vent loop|\bLoop|\bSync[A-Z]")
"""What would be wrong in a blocking module; ``Sync…`` is what unasync makes of names that it does not know.
"""


def generate(name: str, source: str) -> str:
    """Return the blocking module of ``source``, the text of ``SOURCES``' file ``name``.

    Raises:
        ValueError: something of asyncio would be left.
    """
    text = without_async(words_replaced(source))
    if found := LEFT_OVER.search(text):
        raise ValueError(f"{name}: {found[0]!r} has no blocking form: put it behind a name of the channels")
    return formatted(SOURCES[name], f"# Generated from {name} by `{COMMAND}`: edit that file.\n{text}")


def words_replaced(source: str) -> str:
    """``WORDS``, in code and in docstrings."""
    either = "|".join(rf"\b{word}\b" if word.isidentifier() else re.escape(word) for word in WORDS)
    return re.sub(either, lambda found: WORDS[found[0]], source)


def without_async(source: str) -> str:
    """Return ``source`` as unasync, which rewrites files, leaves it."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before", "module.py"), Path(folder, "after", "module.py")
        before.parent.mkdir()
        before.write_text(source, encoding="utf-8")
        unasync.unasync_files([str(before)], [unasync.Rule(fromdir="/before/", todir="/after/")])
        return after.read_text(encoding="utf-8")


def formatted(target: str, text: str) -> str:
    """``text`` with its imports in order and its lines as long as they may be: shorter names change both."""
    for command in (["check", "--select=I", "--fix", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={CLIENT / target}", "-"]
        done = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=CLIENT.parent)
        text = done.stdout
    return text


def main() -> int:
    """Exit status: 1 where ``--check`` finds a file out of date."""
    stale = {}
    for name, target in SOURCES.items():
        text = generate(name, (CLIENT / name).read_text(encoding="utf-8"))
        if not (CLIENT / target).exists() or text != (CLIENT / target).read_text(encoding="utf-8"):
            stale[target] = text
    if "--check" in sys.argv[1:]:
        return int(bool(stale))
    for target, text in stale.items():
        (CLIENT / target).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
