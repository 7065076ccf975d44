"""Takes docs/images/dashboard.png: an engine, a server and a trainer for a minute, then the page in a
headless Chromium.

Run ``PYTHONPATH=tests python docs/take_dashboard.py`` after a change of the page, and look at the picture:
nothing checks it.
"""

import tempfile
import threading
import time
from pathlib import Path

import torch
from support.browser import chromium
from support.checkpoints import make_checkpoint
from support.http_serve import served

from caesura.client import CaesuraError, SchedulerClient, launch_scheduler

PICTURE = Path(__file__).parent / "images" / "dashboard.png"
SIZE = (1120, 1950)
CYCLES = 4
SAMPLING = {"max_new_tokens": 96, "temperature": 1.0, "ignore_eos": True}


def generate(endpoint: str, worker: int, ended: threading.Event) -> None:
    """Ask for one sample after another, as a rollout worker does."""
    with SchedulerClient(endpoint) as client:
        number = 0
        while not ended.is_set():
            number += 1
            prompt = [5 + worker, *range(10, 40 + 5 * (number % 7))]
            try:
                client.generate(prompt, {**SAMPLING, "max_new_tokens": 48 + 24 * (number % 5)})
            except CaesuraError:
                return


def train(client: SchedulerClient, folders: list[Path]) -> None:
    """Pause, update and continue a few times, and end in a pause."""
    for cycle in range(CYCLES):
        time.sleep(5.0)
        client.pause("in_place")
        time.sleep(4.0)
        label = f"policy step {cycle + 1}"
        client.update_weights_from_disk(folders[cycle % 2], weight_version=label, flush_cache=False)
        client.continue_generation()
    time.sleep(5.0)
    client.pause("in_place")
    time.sleep(3.0)


def main() -> None:
    """Make everything but the picture in a temporary folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("tiny-policy", "tiny-policy-next")]
        for seed, folder in enumerate(folders):
            make_checkpoint(folder, "qwen3", tied=True, seed=seed, dtype=torch.bfloat16)
        with (
            launch_scheduler(
                folders[0], num_threads=1, kv_pool_tokens=16384, enable_drift_check=True
            ) as launched,
            served("--endpoint", launched.endpoint, "--served-model-name", "tiny-policy") as server,
            chromium() as browser,
            SchedulerClient(launched.endpoint, owner="trainer-0") as trainer,
        ):
            browser.set_window_size(*SIZE)
            browser.get(f"{server.url}/dashboard")
            ended = threading.Event()
            workers = [
                threading.Thread(target=generate, args=(launched.endpoint, n, ended)) for n in range(12)
            ]
            for worker in workers:
                worker.start()
            train(trainer, folders)
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False},
            )
            browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            time.sleep(2.0)
            browser.save_screenshot(str(PICTURE))
            ended.set()
            trainer.abort(abort_all=True)
            trainer.continue_generation()
            for worker in workers:
                worker.join()


if __name__ == "__main__":
    main()
