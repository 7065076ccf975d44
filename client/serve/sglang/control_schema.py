"""Bodies of SGLang's control routes.

Invariants: field names and defaults are SGLang's; a key that is not a field is refused by name, since ``mod`` for ``mode``
would otherwise abort what was to be frozen. What SGLang's clients send and has no meaning here is a field below "accepted and
ignored"; ``docs/reference/http.md`` says why, and a test compares the two.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ....io_struct import MemoryTag, PauseMode, TraceActivity
from ....io_struct.base import MAX_ID_LENGTH
from ....io_struct.control import LeaseAction, PositiveDuration
from ....io_struct.profile import TraceSteps
from ....io_struct.weights import DEFAULT_BROADCAST_TIMEOUT_S, DEFAULT_GROUP_NAME
from ...connection.options import update_fields

Selector = Literal["target", "all"]
MAX_LABEL = 1024
"""Characters of a weight version: it comes back with every answer."""
VISIBLE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""Names that come up in logs and at terminals have no control characters."""
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL, pattern=VISIBLE)]
Group = Annotated[str, msgspec.Meta(max_length=MAX_LABEL, pattern=VISIBLE)]
SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]


Version = Label | int
"""A weight version; a number, a step counter say, becomes text."""


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body or query of which every key must be known."""


class PauseBody(Strict, kw_only=True):
    """``/pause_generation``."""

    mode: PauseMode = "abort"
    lease_s: PositiveDuration | None = None
    """Ours: seconds without a command from an HTTP client after which ``on_lease_expiry`` happens."""
    on_lease_expiry: LeaseAction = "continue"


class ContinueBody(Strict, kw_only=True):
    """``/continue_generation``."""

    torch_empty_cache: bool = True
    force: bool = False
    """Caesura's own: continue a pause, and commit an implicit weight session, of a sender other than HTTP clients."""


class TagsBody(Strict, kw_only=True):
    """``/release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: list[MemoryTag] | None = None


class VersionBody(Strict, kw_only=True):
    """``/update_weight_version``."""

    new_version: Version
    abort_all_requests: bool = True
    session_id: SessionId | None = None
    """Ours: refused, as it commits by itself; the header ``X-Caesura-Session`` says the same."""


class CheckerBody(Strict, kw_only=True):
    """``/weights_checker``."""

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"
    selector: Selector = "all"
    # accepted and ignored
    allow_quant_error: bool = False
    # refused unless empty
    skip_tensor_list: list[str] = []


class PostProcessBody(Strict, kw_only=True):
    """``/post_process_weights``, of slime's patches."""

    # accepted and ignored
    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


class InitGroupBody(Strict, kw_only=True):
    """``/init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: Group = DEFAULT_GROUP_NAME
    backend: Literal["nccl", "gloo"] | None = None
    timeout_s: PositiveDuration = 60.0
    """Ours: longest wait for the other ranks."""
    broadcast_timeout_s: PositiveDuration = DEFAULT_BROADCAST_TIMEOUT_S
    """Ours: longest wait for each broadcast."""

    # accepted and ignored
    pp_rank: int | None = None
    """AReaL's."""

    def arguments(self) -> dict[str, Any]:
        """What the client's method of this name takes."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "pp_rank"}


class DestroyGroupBody(Strict, kw_only=True):
    """``/destroy_weights_update_group``."""

    group_name: Group = DEFAULT_GROUP_NAME


class BeginBody(Strict, kw_only=True):
    """``/begin_weight_update``."""

    selector: Selector = "all"
    deadline_s: PositiveDuration | None = None
    """Ours: abort the session after so many seconds."""


class EndBody(Strict, kw_only=True):
    """``/end_weight_update``."""

    commit: bool = True
    """Ours: false aborts the session."""
    weight_version: Version | None = None
    """Ours: the new label."""
    session_id: SessionId | None = None
    """Ours: which session; the header ``X-Caesura-Session`` says the same. Null: the implicit one of HTTP clients."""
    force: bool = False
    """Ours: abort whatever session is open, with ``commit`` false."""


class UpdateBody(Strict, kw_only=True):
    """What every update may say."""

    flush_cache: bool = True
    torch_empty_cache: bool = False
    weight_version: Version | None = None
    abort_all_requests: bool = False
    component: Label | None = None
    """Ours: the component of a diffusion pipeline that is written. Null: its transformer."""
    session_id: SessionId | None = None
    """Ours: the session that the call belongs to; the header ``X-Caesura-Session`` says the same."""

    def options(self) -> dict[str, Any]:
        """These fields, for the wire."""
        return update_fields({name: getattr(self, name) for name in UpdateBody.__struct_fields__})


class DiskBody(UpdateBody, kw_only=True):
    """``/update_weights_from_disk``."""

    model_path: str
    load_format: str | None = None
    # accepted and ignored
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    # refused unless empty
    manifest: Any = None


class DistributedBody(UpdateBody, kw_only=True):
    """``/update_weights_from_distributed``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: Group = DEFAULT_GROUP_NAME
    load_format: str | None = None
    selector: Selector = "all"


class TensorBody(UpdateBody, kw_only=True):
    """``/update_weights_from_tensor`` as JSON: pickles in base64, one for each tensor-parallel rank."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    selector: Selector = "all"
    # accepted and ignored
    disable_draft_model: bool = False
    """Of SGLang before ``selector``."""


class SafetensorsQuery(UpdateBody, kw_only=True):
    """``/update_weights_from_tensor`` with a safetensors file as body: the options stand in the query."""


class ParameterServerBody(UpdateBody, kw_only=True):
    """``/update_weights_from_ipc``."""

    zmq_handles: dict[str, str]
    timeout_s: PositiveDuration = 300.0
    """Ours: longest silence of the server."""


class StartProfileBody(Strict, kw_only=True):
    """``/start_profile``."""

    output_dir: str | None = None
    num_steps: TraceSteps | None = None
    activities: list[TraceActivity] | None = None
    with_stack: bool = False
    record_shapes: bool = False
    # accepted and ignored
    profile_prefix: Any = None
    # refused unless empty
    start_step: Any = None
    profile_by_stage: Any = None
    profile_stages: Any = None
    merge_profiles: Any = None

    REFUSED: ClassVar = ("start_step", "profile_by_stage", "profile_stages", "merge_profiles")


class StopProfileBody(Strict, kw_only=True):
    """``/stop_profile``."""

    # accepted and ignored
    num_steps: Any = None
    """Of SGLang's older benchmarks, which send what they gave ``/start_profile``."""
    start_step: Any = None


class TokenizeBody(Strict, kw_only=True):
    """``/tokenize``."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    # accepted and ignored
    model: str = ""


class DetokenizeBody(Strict, kw_only=True):
    """``/detokenize``."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool = True
    # accepted and ignored
    model: str = ""
