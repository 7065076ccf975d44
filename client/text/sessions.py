"""Conversations as trees of turns whose token ids are made once.

Invariants:
- A turn that has a parent begins with exactly the parent's prompt and output ids; only what the template
  writes behind that output is encoded. Where that cannot be, the turn has no parent and a reason
  (:attr:`Turn.branch`).
- A node is one sample that its client has seen, and never changes. Siblings are samples of one turn, or of
  turns that continue the same node.
- A conversation is found again by what its messages say: ids of tool calls, reasoning, null fields and the
  spelling of arguments do not count. Turns of token ids are found by their request's id.
- A store holds at most so many sessions and tokens. A session that has ended, expired or was evicted raises
  :class:`~..exceptions.SessionGone` for as long as its id is remembered. Answers that are kept end with it.
"""

import hashlib
import json
import math
import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from time import monotonic
from typing import Any, Literal

import msgspec

from ...io_struct import RoutedExperts, WeightVersionSpan, new_id
from ..exceptions import InvalidRequest, SessionGone
from .answer_parser import ParsedAnswer, ToolCall
from .tokenizer import TextTokenizer
from .tokenizer_manager import Sample

Message = Mapping[str, Any]
Branch = Literal[
    "sibling", "new_root", "history_changed", "tools_changed", "template", "continued", "truncated"
]
"""Reason of a turn that does not extend the newest sample of its conversation. ``sibling``: another turn
continues the same sample. ``new_root``: a conversation of its own. ``history_changed``: the messages have an
answer that is not the session's. ``tools_changed``: tools, template or its variables differ. ``template``:
the template does not show the new messages behind the answer. ``continued``: the last answer, which had
ended, goes on. ``truncated``: the prompt was cut."""
MAX_REMEMBERED = 1 << 16
"""Ids of sessions that are gone and are still told so."""
MAX_LEASE_S = 1e9
NODE_TOKENS = 192
"""Tokens of eight bytes that a node, or a kept answer, counts beside its own, for what it takes."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """The template and tokenizer of one request."""

    render: Callable[[Sequence[Message], bool | None], str]
    """Text of messages; True or False: with or without generation prompt, None: as the request says."""
    encode: Callable[[str], list[int]]
    tokenizer: TextTokenizer
    form: bytes
    """Tools, template and its variables, in any encoding."""
    continued: bool = False
    """The last message goes on: no generation prompt, no end of turn."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    turn: int
    index: int
    parent: "Node | None"
    branch: Branch | None
    new_ids: "array[int]"
    """The prompt without the parent's ids."""
    output_ids: "array[int]"
    logprobs: "array[float] | None"
    """None if its request had none computed."""
    spans: list[WeightVersionSpan]
    finish: str
    closed: int | None
    """Special token that ended the output, or None: the turn has still to be closed."""
    routed: RoutedExperts | None
    known: int
    """Number of the parent's messages that come before those of this node."""
    messages: list[dict[str, Any]]
    """Messages that the parent has not, and the answer; none of a turn of token ids."""
    length: int
    """Number of tokens from the conversation's start to the output's end."""

    def path(self) -> "list[Node]":
        nodes: list[Node] = []
        step: Node | None = self
        while step is not None:
            nodes.append(step)
            step = step.parent
        return nodes[::-1]

    def ids(self) -> list[int]:
        return [token for node in self.path() for part in (node.new_ids, node.output_ids) for token in part]

    def conversation(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for node in self.path():
            messages[node.known :] = node.messages
        return messages

    @property
    def cost(self) -> int:
        routed = 0 if self.routed is None else len(self.routed.data) // 16
        text = len(msgspec.json.encode(self.messages)) // 4
        return NODE_TOKENS + len(self.new_ids) + len(self.output_ids) + text + routed


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """An answer that is found by its id, to be read and gone on from."""

    store: "SessionStore"
    session_id: str
    node: Node
    body: bytes
    beside: int = 0
    """Number of the conversation's first messages that are not gone on with."""

    @property
    def cost(self) -> int:
        return NODE_TOKENS + len(self.body) // 8


@dataclass(slots=True, eq=False)
class _Session:
    id: str
    lease_s: float
    used: float
    streaming: bool = False
    """A turn of token ids continues the newest one unless it names another."""
    leased: bool = False
    turns: int = 0
    tokens: int = 0
    nodes: list[Node] = field(default_factory=list)
    by_key: dict[bytes, list[Node]] = field(default_factory=dict)
    forms: set[bytes] = field(default_factory=set)
    followed: dict[Node | bytes, int] = field(default_factory=dict)
    """First turn after a node, or with the same first prompt."""
    kept: set[tuple[bytes, str]] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt of a session, to be recorded with each sample that its client sees."""

    store: "SessionStore"
    session: _Session
    number: int
    prompt_ids: list[int]
    parent: Node | None
    branch: Branch | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All messages of the prompt."""
    known: int = 0
    """Number of messages that the parent has."""
    continued: bool = False
    form: bytes = b""
    special: frozenset[int] = frozenset()
    """Tokens that can close an answer."""
    rid: str | None = None
    """Name by which a turn of token ids is found. None means by its messages."""

    @property
    def reused(self) -> int:
        """Number of the prompt's ids that were not encoded anew."""
        return 0 if self.parent is None else self.parent.length

    def lease(self) -> dict[str, Any]:
        """Return the fields of a generation that leases what it caches."""
        self.session.leased = True
        seconds = min(self.session.lease_s, MAX_LEASE_S)
        return {"prefix_lease": self.store.lease_name(self.session.id), "prefix_lease_s": seconds}

    def told(self, node: Node | None) -> dict[str, Any]:
        """Return what an answer that was recorded as ``node`` says about its turn; None: it was not."""
        parent = self.parent if node is None else node.parent
        return {
            "id": self.session.id,
            "turn": None if node is None else self.number,
            "parent": None if parent is None else parent.turn,
            "reused_tokens": 0 if parent is None else parent.length,
            "branch": self.branch if node is None else node.branch,
        }


class SessionStore:
    """The sessions of one front end, for any number of threads."""

    def __init__(
        self,
        max_sessions: int = 4096,
        max_tokens: int = 1 << 25,
        lease_s: float = 3600.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Let a session expire ``lease_s`` after its last call; evict the least recently used one first."""
        self.lease_s = lease_s
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._clock = clock
        self._lock = Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._ended: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._hear: Callable[[], object] = lambda: None
        self._kept: dict[tuple[bytes, str], Kept] = {}
        self._tokens = 0
        self._next = math.inf  # no session expires before
        self._secret = secrets.token_bytes(16)  # two front ends of one engine do not share leases

    def subscribe(self, hear: Callable[[], object]) -> None:
        """Call ``hear`` whenever :meth:`take_ended` has something new, in any thread."""
        self._hear = hear

    def open(
        self, session_id: str | None = None, lease_s: float | None = None, *, streaming: bool = False
    ) -> str:
        """Begin a session, also one whose id is gone; InvalidRequest if it is there. Return its id."""
        with self._lock:
            self._expire()
            name = session_id or new_id()
            if name in self._sessions:
                raise InvalidRequest(f"the session {name!r} is open", field="session_id")
            self._gone.pop(name, None)
            self._begin(name, lease_s).streaming = streaming
            return name

    def turn(
        self,
        session_id: str,
        messages: Sequence[Message],
        prompts: ChatPrompts,
        *,
        after: Node | None = None,
        counts: bool = True,
    ) -> Turn:
        """Return the prompt of ``messages`` in template form, in a session that begins if it is new.

        ``after`` is preferred among samples that say the same. With ``counts`` False the session stays as
        it is, and as new as it is.
        """
        found = [dict(each) for each in messages]
        form = hashlib.blake2b(prompts.form, digest_size=16).digest()
        keys = _keys(form, found)
        with self._lock:
            self._expire()
            session = self._used(session_id, begin=True) if counts else self._found(session_id)
            number = session.turns + 1
            if counts:
                session.turns = number
            parent, known = _deepest(session, keys, found, after)
            branch = _reason(session, parent, form, keys, found[known:], number)
        ids = None if parent is None else self._extended(parent, found[:known], found[known:], prompts)
        if ids is None:
            if parent is not None:
                branch = "continued" if prompts.continued else "template"
            parent, known = None, 0
            ids = prompts.encode(prompts.render(found, None))
        return Turn(
            store=self,
            session=session,
            number=number,
            prompt_ids=ids,
            parent=parent,
            branch=branch,
            messages=found,
            known=known,
            continued=prompts.continued,
            form=form,
            special=prompts.tokenizer.skipped,
        )

    def append(
        self,
        session_id: str,
        rid: str,
        new: Callable[[bool], list[int]],
        *,
        after: str | None = None,
        offset: int = 0,
        replace: bool = False,
        drop_previous_output: bool = False,
    ) -> Turn:
        """Return a turn of token ids, ``rid``, in an open session: those of the turn ``after`` and ``new``.

        ``new`` is called with True if there are ids before. ``offset`` cuts these, and with
        ``drop_previous_output`` they end with the prompt of ``after``. With ``replace`` the session forgets
        what has continued ``after``, or without that all of its turns.
        """
        with self._lock:
            self._expire()
            session = self._used(session_id)
            named = session.by_key.get(_rid_key(after or ""), [])
            if after is not None and not named:
                reason = f"session_params.rid: no turn {after!r} of the session {session_id!r} has ended"
                raise InvalidRequest(reason, field="session_params")
            before = named[-1] if named else None
            if session.streaming:
                if replace or offset or drop_previous_output:
                    reason = (
                        "a streaming session is only appended to: no replace, offset, drop_previous_output"
                    )
                    raise InvalidRequest(f"session_params: {reason}", field="session_params")
                before = before or (session.nodes[-1] if session.nodes else None)
            if replace:
                self._replace(session, before)
            session.turns += 1
            number, first = session.turns, not session.nodes
        ids = [] if before is None else before.ids()
        if before is not None and drop_previous_output:
            del ids[before.length - len(before.output_ids) :]
        ids = ids[: offset or None]
        parent = before
        while parent is not None and parent.length > len(ids):
            parent = parent.parent
        branch: Branch | None = None if parent is not None or first else "new_root"
        ids += new(before is not None)
        return Turn(
            store=self, session=session, number=number, prompt_ids=ids, parent=parent, branch=branch, rid=rid
        )

    def _replace(self, session: _Session, node: Node | None) -> None:
        """Forget what continues ``node``, or everything."""
        left = [] if node is None else [each for each in session.nodes if node not in each.path()[:-1]]
        freed = sum(each.cost for each in session.nodes) - sum(each.cost for each in left)
        stay = set(left)
        session.nodes = left
        found = {key: [each for each in nodes if each in stay] for key, nodes in session.by_key.items()}
        session.by_key = {key: nodes for key, nodes in found.items() if nodes}
        session.followed = {
            key: turn
            for key, turn in session.followed.items()
            if node is not None and key is not node and (isinstance(key, bytes) or key in stay)
        }
        session.tokens -= freed
        self._tokens -= freed

    @staticmethod
    def _extended(
        parent: Node, before: list[dict[str, Any]], new: list[dict[str, Any]], prompts: ChatPrompts
    ) -> list[int] | None:
        if prompts.continued and not new:
            return parent.ids() if parent.closed is None else None
        more = extension(before, new, parent.closed, prompts)
        return None if more is None else parent.ids() + more

    def record(self, turn: Turn, sample: Sample, message: Message) -> Node | None:
        """Keep a sample with the answer as its client sees it; None if the session is gone meanwhile."""
        output = sample.output
        before = [] if turn.parent is None else turn.prompt_ids[: turn.parent.length]
        cut = len(sample.prompt_ids) != len(turn.prompt_ids)
        parent = None if cut else turn.parent
        new_ids = sample.prompt_ids[0 if cut else len(before) :]
        answer = {name: value for name, value in message.items() if value not in (None, [])}
        history = turn.messages
        if turn.continued and history:
            text = f"{_text(history[-1].get('content'))}{_text(answer.get('content'))}"
            history, answer = history[:-1], {**answer, "content": text}
        if turn.rid is None:
            keys = _keys(turn.form, [*history, answer])
            messages = [*history[0 if parent is None else min(turn.known, len(history)) :], answer]
        else:
            keys, messages = [_rid_key(turn.rid)] * 2, []
        matched = output.finish_reason.matched
        with self._lock:
            session = turn.session
            if self._sessions.get(session.id) is not session:
                self._tell(session)  # its last request has leased anew since it ended
                return None
            first = session.followed.setdefault(parent or keys[-2], turn.number)
            branch: Branch | None = "truncated" if cut else turn.branch
            node = Node(
                turn=turn.number,
                index=sample.index,
                parent=parent,
                branch=branch or (None if first == turn.number else "sibling"),
                new_ids=array("i", new_ids),
                output_ids=array("i", output.output_ids),
                logprobs=None if output.output_logprobs is None else array("f", output.output_logprobs),
                spans=output.weight_versions,
                finish=output.finish_reason.type,
                closed=matched if matched in turn.special else None,
                routed=output.routed_experts,
                known=0 if parent is None else min(turn.known, len(history)),
                messages=messages,
                length=len(sample.prompt_ids) + len(output.output_ids),
            )
            session.nodes.append(node)
            session.forms.add(turn.form)
            session.by_key.setdefault(keys[-1], []).append(node)
            cost = node.cost
            session.tokens += cost
            self._tokens += cost
            self._used(session.id)
            self._make_room(session)
            return node

    def keep(self, name: tuple[bytes, str], kept: Kept) -> None:
        """Keep an answer under an owner and an id, unless there is one, or the session is gone."""
        with self._lock:
            session = self._sessions.get(kept.session_id)
            if session is None or name in self._kept:
                return
            self._kept[name] = kept
            session.kept.add(name)
            session.tokens += kept.cost
            self._tokens += kept.cost
            self._make_room(session)

    def kept(self, name: tuple[bytes, str]) -> Kept | None:
        return self._kept.get(name)

    def forget(self, name: tuple[bytes, str]) -> bool:
        """Forget a kept answer; return True if its session has no other."""
        with self._lock:
            kept = self._kept.pop(name, None)
            session = None if kept is None else self._sessions.get(kept.session_id)
            if kept is None or session is None:
                return False
            session.kept.discard(name)
            session.tokens -= kept.cost
            self._tokens -= kept.cost
            return not session.kept

    def export(self, session_id: str) -> dict[str, Any]:
        """Return the session's training samples: one for each leaf of the tree, in order of their turns."""
        with self._lock:
            self._expire()
            session = self._used(session_id)
            nodes = list(session.nodes)
        inner = {node.parent for node in nodes}
        seen: set[Node] = set()
        samples = []
        for leaf in (node for node in nodes if node not in inner):
            samples.append(_sample(leaf, seen))
            seen.update(leaf.path())
        return {
            "session_id": session_id,
            "turns": session.turns,
            "tokens": session.tokens,
            "samples": samples,
        }

    def finish(self, session_id: str) -> bool:
        """End a session; False if there is none."""
        with self._lock:
            found = self._sessions.get(session_id)
            if found is not None:
                self._end(found, "finished")
            return found is not None

    def ids(self) -> list[str]:
        """Return the ids of all sessions, the least recently used first."""
        with self._lock:
            self._expire()
            return list(self._sessions)

    def lease_name(self, session_id: str) -> str:
        """Return the name under which engines keep the session's prefixes."""
        return hashlib.blake2b(session_id.encode(), key=self._secret, digest_size=16).hexdigest()

    def take_ended(self) -> list[str]:
        """Return the lease names of sessions that have gone since the last call."""
        with self._lock:
            self._expire()
            ended = list(self._ended)
            self._ended.clear()
            return ended

    def usage(self) -> tuple[int, int]:
        """Return the numbers of sessions and of their tokens."""
        return len(self._sessions), self._tokens

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def _begin(self, session_id: str, lease_s: float | None = None) -> _Session:
        session = _Session(session_id, self.lease_s if lease_s is None else lease_s, self._clock())
        self._sessions[session_id] = session
        self._next = min(self._next, session.used + session.lease_s)
        self._make_room(session)
        return session

    def _found(self, session_id: str) -> _Session:
        """Return a session, or one like it would begin; SessionGone if it has ended."""
        found = self._sessions.get(session_id)
        if found is None and (reason := self._gone.get(session_id)) is not None:
            raise _gone(session_id, reason)
        return found or _Session(session_id, self.lease_s, self._clock())

    def _used(self, session_id: str, *, begin: bool = False) -> _Session:
        found = self._sessions.get(session_id)
        if found is None:
            reason = self._gone.get(session_id, "unknown")
            if begin and reason == "unknown":
                return self._begin(session_id)
            raise _gone(session_id, reason)
        found.used = self._clock()
        self._sessions.move_to_end(session_id)
        return found

    def _expire(self) -> None:
        now = self._clock()
        if now >= self._next:
            for session in [each for each in self._sessions.values() if each.used + each.lease_s <= now]:
                self._end(session, "expired")
            self._next = min((each.used + each.lease_s for each in self._sessions.values()), default=math.inf)

    def _make_room(self, newest: _Session) -> None:
        while len(self._sessions) > self._max_sessions or self._tokens > self._max_tokens:
            oldest = next(iter(self._sessions.values()))
            self._end(oldest, "too_large" if oldest is newest else "evicted")

    def _end(self, session: _Session, reason: str) -> None:
        del self._sessions[session.id]
        self._tokens -= session.tokens
        self._gone[session.id] = reason
        self._gone.move_to_end(session.id)
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)
        for name in session.kept:
            del self._kept[name]
        self._tell(session)

    def _tell(self, session: _Session) -> None:
        if session.leased:
            self._ended.append(self.lease_name(session.id))
            self._hear()


def tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def assistant_message(answer: ParsedAnswer) -> dict[str, Any]:
    """Return an answer as the message that the conversation goes on from."""
    return {
        "role": "assistant",
        "content": answer.content,
        **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
        **({"tool_calls": [tool_call(call) for call in answer.calls]} if answer.calls else {}),
    }


def _gone(session_id: str, reason: str) -> SessionGone:
    return SessionGone(f"the session {session_id!r} is gone: {_GONE[reason]}", reason=reason)


def _rid_key(rid: str) -> bytes:
    return b"rid " + rid.encode("utf-8", "surrogatepass")


_GONE = {
    "unknown": "there is none of this id, or it has been forgotten",
    "finished": "it was finished",
    "expired": "its lease has expired",
    "evicted": "the front end needed its room for others",
    "too_large": "it alone has more tokens than the front end keeps",
}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _said(message: Message) -> list[Any]:
    """Return what a message says, whichever library has passed it on."""
    role, text = message.get("role"), _text(message.get("content"))
    if role != "assistant":
        return [role, text, message.get("name") or ""]
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = arguments.strip()
        calls.append([function.get("name"), arguments])
    return [role, text.strip(), calls]


def _keys(form: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Return one key for every prefix of the messages, the empty one first."""

    def longer(key: bytes, said: bytes) -> bytes:
        return hashlib.blake2b(key + said, digest_size=16).digest()

    said = (json.dumps(_said(each), sort_keys=True, default=str).encode() for each in messages)
    return list(accumulate(said, longer, initial=form))


def _deepest(
    session: _Session, keys: list[bytes], messages: Sequence[Message], after: Node | None
) -> tuple[Node | None, int]:
    """Return a node of the longest prefix that has one, ``after`` or the newest, and its message count."""
    for count in range(len(messages), 0, -1):
        if messages[count - 1].get("role") == "assistant" and (nodes := session.by_key.get(keys[count])):
            return after if after in nodes else nodes[-1], count
    return None, 0


def _reason(
    session: _Session,
    parent: Node | None,
    form: bytes,
    keys: list[bytes],
    new: list[dict[str, Any]],
    turn: int,
) -> Branch | None:
    if not session.nodes:
        return None
    if parent is None and session.forms and form not in session.forms:
        return "tools_changed"
    if any(each.get("role") == "assistant" for each in new):
        return "history_changed"
    if session.followed.get(parent or keys[-1], turn) != turn:
        return "sibling"
    return None if parent is not None else "new_root"


def extension(
    before: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], closed: int | None, prompts: ChatPrompts
) -> list[int] | None:
    """Return the ids behind an answer, the last of ``before``, that lead to the next one; None if unknown.

    The answer is rendered with a mark in its place, with and without what follows: what both renderings
    have behind the mark is the answer's own. ``closed`` is the token by which the sample closed itself,
    which stands for the template's.
    """
    *history, answer = before
    for marked, mark, name in _marked(answer):
        try:
            alone = prompts.render([*history, marked], False)
            followed = prompts.render([*history, marked, *new], None)
        except InvalidRequest:  # the template refuses the mark, or the messages, as the caller will see
            continue
        _, found, own = alone.partition(mark)
        head, again, tail = followed.partition(mark)
        if not found or not again:
            continue
        cut = _behind(own, tail, closed, prompts, calls=bool(name))
        if cut is None:
            continue
        anchor, text = cut
        text = text.replace(mark, name)
        if not _shows(text, new) or not _shows(
            head, [each for each in history if each.get("role") == "user"]
        ):
            continue
        if closed is None:
            return prompts.encode(anchor + text)
        ids = prompts.encode(anchor + text)
        return ids[1:] if anchor or ids[:1] == [closed] else ids
    return None


def _marked(answer: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Return forms of an answer with a mark near its end, the mark, and the text that it stands for."""
    mark = f"mark{secrets.token_hex(12)}"
    kept = {name: value for name, value in answer.items() if name not in _REASONING}
    calls = kept.get("tool_calls")
    if not calls:
        return [({**kept, "content": mark}, mark, "")]
    *others, last = calls
    function = last["function"]
    forms = [({**last, "function": {**function, "name": mark}}, str(function.get("name") or ""))]
    if last.get("id"):
        forms.append(({**last, "id": mark}, str(last["id"])))
    marked = [({**kept, "tool_calls": [*others, call]}, mark, name) for call, name in forms]
    if kept.get("content"):  # which templates show behind the calls' results, or in place of the calls
        marked += [({**each, "content": ""}, mark, name) for each, _, name in marked]
        marked.append(({**kept, "content": mark}, mark, ""))
    return marked


def _behind(
    own: str, tail: str, closed: int | None, prompts: ChatPrompts, *, calls: bool
) -> tuple[str, str] | None:
    """Return the template's end of turn (empty if it has none) and the text behind it.

    ``own`` is what the template writes behind the mark of an answer that nothing follows.
    """
    tokenizer = prompts.tokenizer

    def written(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    special = [token for token in prompts.encode(own) if token in tokenizer.skipped]
    end = written(special[-1]) if special else ""
    at = own.rfind(end) if end else -1
    if at < 0 or own[at + len(end) :].strip():  # the next turn's beginning is the end of this one
        start = len(own.rstrip()) if calls else 0
        return ("", tail[start:]) if tail[:start] == own[:start] else None
    if tail[:at] != own[:at]:
        return None
    rest = tail[at:]
    if not rest.startswith(end):  # an answer that is not the last may end by another token
        first = prompts.encode(rest)[:1]
        end = written(first[0]) if first and first[0] in tokenizer.skipped else ""
        if not end or not rest.startswith(end):
            return None
    return end, rest[len(end) :]


def _shows(text: str, messages: Sequence[Message]) -> bool:
    """Return True if the contents stand in ``text`` in their order, as they are or as JSON."""
    at = 0
    for message in messages:
        content = _text(message.get("content")).strip()
        forms = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
        places = [(place, len(form)) for form in forms if (place := text.find(form, at)) >= 0]
        if not places:
            return False
        place, size = min(places)
        at = place + size
    return True


def _sample(leaf: Node, seen: set[Node]) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] | None = []
    spans: list[dict[str, Any]] = []
    turns = []
    shared = 0
    path = leaf.path()
    for node in path:
        start = len(ids) + len(node.new_ids)
        ids += [*node.new_ids, *node.output_ids]
        mask += [0] * len(node.new_ids) + [1] * len(node.output_ids)
        if node.logprobs is None or logprobs is None:
            logprobs = None
        else:
            logprobs += [0.0] * len(node.new_ids) + list(node.logprobs)
        for span in node.spans:
            moved = msgspec.structs.replace(span, start=span.start + start, end=span.end + start)
            spans.append(msgspec.to_builtins(moved))
        turns.append({"turn": node.turn, "index": node.index, "start": start, "end": len(ids),
                      "branch": node.branch, "finish_reason": node.finish})  # fmt: skip
        shared = len(ids) if node in seen else shared
    return {
        "token_ids": ids,
        "mask": mask,
        "logprobs": logprobs,
        "weight_versions": spans,
        "turns": turns,
        "shared_tokens": shared,
        "finish_reason": leaf.finish,
        "messages": leaf.conversation(),
        "routed_experts": leaf.routed,
    }
