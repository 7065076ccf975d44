"""Try grammars in a process of its own, which ``grammars.py`` starts by this path, and the kernel may end.

Invariants: the kernel limits the CPU time of a grammar and the memory of all; the process ends with its
connection. llguidance's own limits do not bound the time: an object of 10,000 properties takes a minute.
Nothing of the package is imported, as this is a script, too.
"""

import json
import math
import resource
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MAX_GBNF = 64 << 10
"""Most characters of a grammar in GBNF, whose translation is Python's work, and quadratic."""
STACK_BYTES = 1 << 30
"""Stack of a compiling thread, in address space: llguidance recurses along chains of rules, and overflows
the usual one with 5,000 of them, which would end the process."""


class GrammarError(ValueError):
    """A grammar that llguidance does not take."""


def read_tokenizer(path: str, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """Return llguidance's tokenizer; its last tokens may be beyond the model's vocabulary."""
    from llguidance import LLTokenizer  # an extra, and slow to import

    try:
        return LLTokenizer(path, n_vocab=vocab_size, eos_token=eos_token_ids or None)
    except ValueError:
        return LLTokenizer(path, eos_token=eos_token_ids or None)


def without_gbnf(text: str) -> str:
    """Return a grammar, or llguidance's form of several, with Lark in place of GBNF; raises GrammarError."""
    if not text.lstrip().startswith("{"):
        return _lark_of(text) if "::=" in text else text
    if '"gbnf"' not in text:
        return text
    try:
        given = json.loads(text)
        for each in given["grammars"]:
            if "gbnf" in each:
                each["lark_grammar"] = _lark_of(each.pop("gbnf"))
    except GrammarError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return text  # llguidance says what is wrong
    return json.dumps(given)


def _lark_of(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > MAX_GBNF:
        raise GrammarError(f"{len(text)} characters of GBNF; at most {MAX_GBNF}")
    try:
        return str(any_to_lark(text))
    except Exception as error:
        raise GrammarError(f"{type(error).__name__}: {error}") from error


def new_matcher(tokenizer: Any, text: str) -> Any:
    """Return llguidance's matcher of a grammar without GBNF; raises GrammarError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, text, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


def in_deep_thread(work: Callable[[], None]) -> threading.Thread:
    usual = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="caesura-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


def main(descriptor: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the engine's threads block signals: SIGXCPU, too
    connection = Connection(descriptor)
    start = json.loads(connection.recv_bytes())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (start["memory_bytes"],) * 2)
    tokenizer = read_tokenizer(start["path"], start["vocab_size"], start["eos_token_ids"])
    answer: dict[str, str] = {}

    def attempt(text: str) -> None:
        try:
            answer["text"] = without_gbnf(text)
            new_matcher(tokenizer, answer["text"])
        except GrammarError as error:
            answer["error"] = str(error)

    while True:
        try:
            text = connection.recv_bytes().decode("utf-8", "surrogatepass")
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(used.ru_utime + used.ru_stime) + start["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        answer.clear()
        in_deep_thread(lambda text=text: attempt(text)).join()  # type: ignore[misc]
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
