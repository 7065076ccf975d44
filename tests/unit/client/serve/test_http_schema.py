"""Bodies of SGLang's and vLLM's routes: what they become, and that the pages tell of every field."""

import base64
import json
import os
import re
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from support.http_server import routes_served

from caesura.client.exceptions import InvalidRequest
from caesura.client.serve import drift_routes, lora_routes
from caesura.client.serve.grammar_fields import NATIVE
from caesura.client.serve.options import ServeOptions
from caesura.client.serve.sglang import control, weights
from caesura.client.serve.sglang import generate as schema
from caesura.client.serve.sglang.generate import routed_experts
from caesura.client.serve.sglang.weights import allowed_path
from caesura.client.serve.vllm import tokens, transfer
from caesura.client.text.tokenizer_manager import GenerationRequest
from caesura.io_struct import RoutedExperts, SamplingParams

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "http.md"
PAGES = [DOCS, DOCS.with_name("vllm.md"), DOCS.parents[1] / "howto" / "sessions.md"]
BODIES = {path: handler.opt["struct"] for _, path, handler in routes_served() if "struct" in handler.opt}
PARTS = {
    "`sampling_params`": schema.SamplingBody,
    "all updates": weights.UpdateBody,
    "`samples`": drift_routes.DriftSampleBody,
    "`init_info`": transfer.InitInfo,
}


class Row(NamedTuple):
    """A field's row on the page."""

    type: str
    default: str

    @property
    def verdict(self) -> str:
        return self.default if self.default in ("ignored", "refused") else "honoured"


@cache
def tables() -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    rows: dict[str, Row] = {}
    for line in "\n".join(page.read_text() for page in PAGES).splitlines():
        heading = re.match(r"\| fields? of (.*?) \| type \| default \| \|", line)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if heading:
            rows = found[heading[1]] = {}
        elif not line.startswith("|"):
            rows = {}
        elif len(cells) > 3:
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), Row(cells[1], cells[2]))
    return found


TABLES = sorted(tables())


def struct_of(name: str) -> type[msgspec.Struct]:
    """Return what the code says of the table ``name``: a part of bodies, or the body of its first route."""
    return PARTS[name] if name in PARTS else BODIES[re.findall(r"/\w[\w/]*", name)[0]]


def own_fields(name: str) -> list[msgspec.inspect.Field]:
    info = msgspec.inspect.type_info(struct_of(name))
    assert isinstance(info, msgspec.inspect.StructType)
    general = weights.UpdateBody.__struct_fields__
    if name == "all updates" or not issubclass(struct_of(name), weights.UpdateBody):
        general = ()
    return [field for field in info.fields if field.name not in general]


@pytest.mark.parametrize("name", TABLES)
def test_the_page_tells_of_every_field_and_of_no_other(name):
    assert set(tables()[name]) == {field.name for field in own_fields(name)}


def routes_of_the_page() -> set[tuple[str, str, str]]:
    section = DOCS.read_text().split("\n## Routes\n")[1].split("\n## ")[0]
    found = set()
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = " ".join(re.findall(r"`([^`]+)`", cells[0]))
        methods = re.findall(r"[A-Z]+", re.sub(r"/\S*", "", names))
        found |= {(method, path, cells[1]) for path in re.findall(r"/\S*", names) for method in methods}
    return found


def test_the_page_lists_every_route_and_table_and_no_other():
    of_others = re.compile(r"\.(openai|anthropic|tinker)\.")  # whose pages have no tables
    bodies = {
        each for each in BODIES.values() if each.__struct_fields__ and not of_others.search(each.__module__)
    }
    assert bodies - {struct_of(name) for name in TABLES} == {lora_routes.SkyRLBody}  # which shares a table
    assert set(PARTS) <= set(TABLES)
    assert routes_of_the_page() == {
        (method, re.sub(r"/x(?=/|$)", "/{id}", path), handler.opt["access"])
        for method, path, handler in routes_served()
    }


@pytest.mark.parametrize(
    ("name", "refused", "ignored"),
    [
        ("`/generate`", schema.REFUSED, schema.IGNORED),
        ("`sampling_params`", schema.REFUSED_SAMPLING, ()),
        ("`/start_profile`", control.StartProfileBody.REFUSED, ()),
        ("`/stop_profile`", (), ("num_steps", "start_step")),
        ("`/inference/v1/generate`", tokens.REFUSED, ("priority",)),
    ],
)
def test_the_page_agrees_with_the_code(name, refused, ignored):
    verdicts = {field: row.verdict for field, row in tables()[name].items()}
    assert {field for field, verdict in verdicts.items() if verdict == "refused"} == set(refused)
    assert {field for field, verdict in verdicts.items() if verdict == "ignored"} == set(ignored)


def words(kind: msgspec.inspect.Type) -> list[str]:
    match kind:
        case msgspec.inspect.Metadata():
            return words(kind.type)
        case msgspec.inspect.UnionType():
            return [word for each in kind.types for word in words(each)]
        case msgspec.inspect.LiteralType():
            return [f'`"{value}"`' for value in kind.values]
        case msgspec.inspect.ListType():
            item = ", ".join(words(kind.item_type))
            return ["list of " + re.sub(r"(?:string|integer|object)$|^list", r"\g<0>s", item)]
    names = {"Bool": "boolean", "Int": "integer", "Float": "number", "Str": "string", "None": ""}
    name = names.get(type(kind).__name__.removesuffix("Type"), "object")
    return [name] if name else []


GENERATING = {"`/generate`", "`sampling_params`", "`/inference/v1/generate`"}
COMMANDS = sorted(set(TABLES) - GENERATING - {"`/tokenize`", "`/detokenize`"})


@pytest.mark.parametrize("name", COMMANDS)
def test_types_and_defaults_of_commands_are_the_codes(name):
    for field in own_fields(name):
        row = tables()[name][field.name]
        if row.verdict != "honoured":
            continue
        default = "required" if field.required else f"`{json.dumps(field.default)}`"
        assert row.default == default, field.name
        assert set(re.split(r", (?:or )?", row.type)) == set(re.split(", ", ", ".join(words(field.type)))), (
            field.name
        )


BESIDE_SAMPLING = (
    "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
)  # fmt: skip
"""Keys of ``sampling_params`` that the engine's parameters lack: texts and events are the front end's."""


def test_defaults_of_generations_are_the_codes():
    body = {
        "max_new_tokens": schema.SamplingBody().max_new_tokens,
        "sampling_seed": None,
        "stop": [],
        "custom_params": None,
        **dict.fromkeys(NATIVE),
        **{name: getattr(GenerationRequest(prompt=""), name) for name in BESIDE_SAMPLING},
    }
    for field, row in tables()["`sampling_params`"].items():
        if row.verdict == "honoured":
            expected = body[field] if field in body else getattr(SamplingParams(), field)
            assert row.default == f"`{json.dumps(expected)}`", field
    of_a_request = GenerationRequest(prompt="")
    logprobs = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    for field in (*logprobs, "return_sampling_mask", "return_routed_experts"):
        expected = json.dumps(getattr(of_a_request, field))
        assert tables()["`/generate`"][field].default == f"`{expected}`", field


def plan(text: str, **options: object) -> schema.Job:
    values = {"max_batch": 16, "detokenize": True, **options}
    return schema.plan_job(schema.decode_body(text.encode()), **values)


@pytest.mark.parametrize("field", schema.REFUSED)
def test_refused_fields_may_be_empty(field):
    for empty in ("null", "false", "[]", '""', "0"):
        assert len(plan(f'{{"input_ids": [1], "{field}": {empty}}}').requests) == 1
    with pytest.raises(InvalidRequest, match=field):
        plan(f'{{"input_ids": [1], "{field}": [1]}}')


@pytest.mark.parametrize("field", schema.REFUSED_SAMPLING)
def test_refused_sampling_parameters_may_be_empty(field):
    assert len(plan(f'{{"input_ids": [1], "sampling_params": {{"{field}": null}}}}').requests) == 1
    with pytest.raises(InvalidRequest, match=field):
        plan(f'{{"input_ids": [1], "sampling_params": {{"{field}": "x"}}}}')


def test_every_sampling_parameter_arrives():
    same = {
        "max_new_tokens": None, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "n": 2,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1, "min_new_tokens": 4,
        "ignore_eos": True, "stop_token_ids": [9],
    }  # fmt: skip
    text = {"no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    given = {**same, **text, "logit_bias": {"5": -1.5}, "sampling_seed": 11, "stop": "end"}
    (request,) = plan(msgspec.json.encode({"text": "a", "sampling_params": given}).decode()).requests
    assert request.sampling_params == SamplingParams(**same, logit_bias={5: -1.5}, seed=11)
    assert list(request.stop) == ["end"]
    assert {name: getattr(request, name) for name in text} == text


def test_per_prompt_lists():
    job = plan(
        '{"input_ids": [[1], [2]], "return_logprob": [true, false], "logprob_start_len": [0, 3], '
        '"top_logprobs_num": 2, "token_ids_logprob": [[4], [5, 6]], '
        '"cache_salt": ["a", "b"], "extra_key": "k"}'
    )
    assert [r.return_logprob for r in job.requests] == [True, False]
    assert [r.logprob_start_len for r in job.requests] == [0, 3]
    assert [r.top_logprobs_num for r in job.requests] == [2, 2]
    assert [r.token_ids_logprob for r in job.requests] == [[4], [5, 6]]
    assert [r.cache_salt for r in job.requests] == ["a\nk", "b\nk"]
    (one,) = plan('{"input_ids": [1], "return_logprob": true, "token_ids_logprob": [4, 5]}').requests
    assert one.token_ids_logprob == [4, 5]
    for field, value in (("return_logprob", "[true]"), ("sampling_params", "[{}]"), ("cache_salt", '["a"]')):
        with pytest.raises(InvalidRequest, match=field):
            plan(f'{{"input_ids": [[1], [2]], "{field}": {value}}}')


def test_text_decides_the_shape_and_ids_are_taken():
    job = plan('{"text": "a", "input_ids": [[1, 2]]}')
    assert (job.as_list, job.requests[0].prompt) == (False, [1, 2])
    assert plan('{"text": ["a"], "input_ids": [1, 2]}').as_list
    for body in (
        '{"text": ["a", "b"], "input_ids": [1]}',
        '{"input_ids": [1, [2]]}',
        '{"input_ids": [[1], 2]}',
    ):
        with pytest.raises(InvalidRequest):
            plan(body)


def test_limits_of_a_batch():
    assert len(plan('{"input_ids": [[1]], "sampling_params": {"n": 16}}').requests) == 1
    for body in ('{"input_ids": [[1], [2]], "sampling_params": {"n": 9}}', json.dumps({"text": ["a"] * 17})):
        with pytest.raises(InvalidRequest, match="limit"):
            plan(body)
    stops = msgspec.json.encode({"text": "a", "sampling_params": {"stop": ["x"] * 33}}).decode()
    with pytest.raises(InvalidRequest, match="32"):
        plan(stops)


MANY = [[1]] * 16


def one(**sampling: object) -> dict[str, object]:
    return {"input_ids": [1], "sampling_params": sampling}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("token_ids_logprob", {"input_ids": MANY, "return_logprob": True, "token_ids_logprob": [1] * 1025}),
        ("stop_token_ids", {**one(stop_token_ids=[1] * 65), "input_ids": MANY}),
        ("logit_bias", {**one(logit_bias={str(i): 1.0 for i in range(1025)}), "input_ids": MANY}),
        ("stop", {**one(stop=["a" * 1025, "b" * 1024]), "input_ids": MANY}),
        ("cache_salt", {"input_ids": MANY, "cache_salt": "s" * 1025}),
        ("cache_salt", {"input_ids": MANY, "cache_salt": "s" * 1025, "extra_key": "k"}),
        ("cache_salt", {"input_ids": MANY, "cache_salt": "s" * 600, "extra_key": "k" * 600}),
        ("extra_key", {"input_ids": MANY, "extra_key": "k" * 1025}),
        ("rid", {"input_ids": MANY, "rid": "r" * 127}),
        ("sampling_params.n", one(n=1025)),
        ("sampling_params.n", one(n=0)),
        ("sampling_params.sampling_seed", one(sampling_seed=-5)),
        ("sampling_params.stop_token_ids", one(stop_token_ids=[-1])),
        ("logit_bias", one(logit_bias={"-1": 1.0})),
        ("input_ids", {"input_ids": [[1, -1]]}),
        ("token_ids_logprob", {"input_ids": [1], "return_logprob": True, "token_ids_logprob": [2**31]}),
        ("routed_experts_start_len", {"input_ids": [1], "routed_experts_start_len": -1}),
        ("routed_experts_dtype", {"input_ids": [1], "routed_experts_dtype": "int8"}),
        ("rid", {"input_ids": [1], "rid": "r" * 129}),
        ("text", {"text": []}),
        ("text", {"text": [], "stream": True}),
    ],
)
def test_values_out_of_range_are_refused_before_copying(field, body):
    with pytest.raises(InvalidRequest, match=re.escape(field)) as caught:
        plan(msgspec.json.encode(body).decode(), max_batch=4096)
    assert field in caught.value.detail["field"]


def test_different_stop_strings_are_bounded():
    def stops(different: int) -> str:
        params = [{"stop": f"{i % different:02d}" * 1024} for i in range(40)]
        return msgspec.json.encode({"input_ids": [[1]] * 40, "sampling_params": params}).decode()

    assert len(plan(stops(32), max_batch=40).requests) == 40
    with pytest.raises(InvalidRequest, match="different"):
        plan(stops(33), max_batch=40)


def test_experts_as_bytes_or_as_int32():
    bytes_ = RoutedExperts(data=bytes([1, 255]), shape=[1, 1, 2], dtype="U8", start=0)
    words = RoutedExperts(data=b"\x01\x01\xff\x00", shape=[1, 1, 2], dtype="U16", start=0)
    assert base64.b64decode(routed_experts(bytes_, "uint8")) == bytes([1, 255])
    assert struct.unpack("<2i", base64.b64decode(routed_experts(bytes_))) == (1, 255)
    assert struct.unpack("<2i", base64.b64decode(routed_experts(words, "int32"))) == (257, 255)
    with pytest.raises(InvalidRequest, match="uint8"):
        routed_experts(words, "uint8")
    assert plan('{"input_ids": [1], "routed_experts_dtype": "uint8"}').body.routed_experts_dtype == "uint8"


NAMES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00002-of-00002.safetensors",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("root/step-1", "root/shared", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    for name in NAMES:
        for folder in ("root/step-1", "root/shared", "outside"):
            (tmp_path / folder / name).write_bytes(b"{}")
    return tmp_path / "root"


def allowed(path: Path | str, root: Path) -> str:
    return allowed_path(str(path), ServeOptions(weights_root=str(root)))


def test_a_folder_and_links_within_the_root_are_taken(root):
    assert allowed(root / "step-1", root) == str(root / "step-1")
    (root / "step-1" / NAMES[1]).unlink()
    (root / "step-1" / NAMES[1]).symlink_to("../shared/model.safetensors")
    (root / "latest").symlink_to("step-1")
    assert allowed(root / "latest", root) == str(root / "step-1")
    assert allowed(root / "not there", root) == str(root / "not there")  # the engine says what is wrong


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", [False, True])
def test_a_file_that_is_a_link_out_of_the_root_is_refused(root, name, deep):
    (root / "step-1" / name).unlink()
    target = root.parent / "outside" / name
    if deep:
        (root / "shared" / "hop").symlink_to(target)
        target = root / "shared" / "hop"
    (root / "step-1" / name).symlink_to(target)
    with pytest.raises(InvalidRequest, match="link out of"):
        allowed(root / "step-1", root)


def test_a_folder_that_leads_out_is_refused(root):
    outside = root.parent / "outside"
    (root / "away").symlink_to(outside)
    (root.parent / "rooted").mkdir()
    for path in (root / "away", root / "../outside", outside, "/", os.path.relpath(root.parent), f"{root}ed"):
        with pytest.raises(InvalidRequest, match="outside"):
            allowed(path, root)


def test_names_in_messages_are_printable(root):
    (root / "step-1" / "\x1b[2J.safetensors").symlink_to(root.parent / "outside" / NAMES[0])
    with pytest.raises(InvalidRequest) as caught:
        allowed(root / "step-1", root)
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize(
    "options,root",
    [
        ({"model_path": "/missing"}, "/missing"),
        ({"model_path": "/m/a"}, "/m"),
        ({"weights_root": "/m"}, "/m"),
        ({}, None),
    ],
)
def test_models_of_the_same_folder_are_allowed(options, root):
    if root:
        assert allowed_path(f"{root}/new", ServeOptions(**options)) == f"{root}/new"
    for path in ("/etc", "/", f"{root}2", "", ".", f"{root}/../etc"):
        with pytest.raises(InvalidRequest, match="--weights-root"):
            allowed_path(path, ServeOptions(**options))
