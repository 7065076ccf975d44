"""A rank that is started by hand joins over tcp, with the keys of a client."""

import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner
from support import engine_template
from support.plain_trainer import free_port

from caesura.client import SamplingParams, launch_scheduler
from caesura.client.keygen import keygen
from caesura.client.launch.launcher import LaunchedScheduler, worker_command

pytestmark = pytest.mark.slow

OPTIONS = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 1024}
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 30]


@pytest.fixture(scope="module")
def joined(tiny_model, tmp_path_factory) -> Iterator[tuple[LaunchedScheduler, subprocess.Popen]]:
    keys, others = tmp_path_factory.mktemp("keys"), tmp_path_factory.mktemp("others")
    for folder in (keys, others):
        assert CliRunner().invoke(keygen, [str(folder), "--client", "worker"]).exit_code == 0
    address = f"tcp://127.0.0.1:{free_port()}"
    command = worker_command("--join", address, "--rank", "1", "--curve-server-key", str(keys / "server.key"))
    stranger = engine_template.Process(
        [*command, "--curve-client-key-file", str(others / "worker.key_secret")]
    )
    worker = engine_template.Process([*command, "--curve-client-key-file", str(keys / "worker.key_secret")])
    options = {
        "curve_secret_key_file": keys / "server.key_secret",
        "curve_authorized_clients": keys / "clients",
        "curve_server_key": keys / "server.key",
        "curve_client_key_file": keys / "worker.key_secret",
    }
    launched = launch_scheduler(tiny_model, tp=2, tp_joined=1, tp_address=address, **OPTIONS, **options)
    stranger.kill()
    assert stranger.wait() in (1, -9), "the engine refuses it: it has ended, or tries again"
    yield launched, worker
    launched.close()
    worker.kill()
    worker.wait()


def test_a_joined_rank_samples_the_tokens_of_one_rank(joined, tiny_model):
    launched, worker = joined
    assert [rank.pid for rank in launched.client.status().ranks] == [worker.pid]
    found = launched.client.generate(input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True)
    with launch_scheduler(tiny_model, **OPTIONS) as client:
        expected = client.generate(input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output_ids == theirs.output_ids
        np.testing.assert_allclose(ours.output_logprobs, theirs.output_logprobs, atol=1e-4)


def test_server_ends_with_the_engine(joined):
    launched, worker = joined
    launched.close()
    assert worker.wait() == 0
