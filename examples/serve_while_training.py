"""Serves a net over HTTP from the device that trains another one, and draws what that costs.

    python examples/serve_while_training.py                     (about a minute, no data needed)
    python examples/serve_while_training.py --seconds 40 --rate 20 --out runs/serving

    training    | step | st-  stands aside  -ep | step |      the lines marked `# sharing`
    server           POST /classify ^  | answer |             aiohttp, in a thread of its own
    clients     Poisson arrivals, each with a deadline        so many requests a second

A part of the time nobody asks, then the clients come. Results: serving.json and serving.png.

    curl localhost:PORT/classify -d '{"picture": [[[0.1, ...], ...], ...]}'           while it runs
"""

import argparse
import asyncio
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import lightning as L
import torch
from aiohttp import web
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfect import OffloadStrategy  # sharing

SHAPE = (3, 32, 32)
CLASSES = 10
THREADS = 8
"""So many requests may wait for the device at once."""
WARM = 4
"""The first steps are planned and compared with plain Lightning's: nobody times them."""
HOST = "127.0.0.1"
BAD_REQUEST = (ValueError, TypeError, OverflowError, RuntimeError)
"""What JSON and torch raise of something that is no picture."""
Picture = torch.Tensor


# ---- the training: an ordinary module, which knows nothing of requests ---------------------------


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(width: int) -> nn.Module:
    return nn.Sequential(
        Block(3, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES),
    )  # fmt: skip


class Classifier(L.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = resnet(width)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pictures, labels = batch
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def batches(batch: int = 64, count: int = 16) -> DataLoader[Any]:
    """Noise with a colour that tells the class, in the shape of CIFAR-10."""
    dice = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (batch * count,), generator=dice)
    tint = torch.randn(CLASSES, 3, 1, 1, generator=dice)[labels]
    pictures = torch.randn(batch * count, *SHAPE, generator=dice) + tint
    return DataLoader(TensorDataset(pictures, labels), batch)


class Clock(L.Callback):
    """Ends the training after some seconds, and notes when each step began."""

    def __init__(self, quiet: float, seconds: float) -> None:
        """The clients come `quiet` seconds after the first steps, and leave at the end."""
        self.began: list[float] = []
        self.come, self.gone = threading.Event(), threading.Event()
        self.came_at = 0.0
        self._quiet, self._seconds = quiet, seconds

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if trainer.global_step < WARM:
            return
        self.began.append(now)
        if not self.come.is_set() and now - self.began[0] >= self._quiet:
            self.came_at = now
            self.come.set()
        trainer.should_stop = now - self.began[0] >= self._seconds

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.gone.set()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.gone.set()
        self.come.set()

    def steps_a_second(self, busy: bool) -> float:
        """Of the stretch without clients, or of the one with them."""
        stamps = [at for at in self.began if (at >= self.came_at) == busy]
        return (len(stamps) - 1) / (stamps[-1] - stamps[0]) if len(stamps) > 1 else float("nan")


# ---- the server ----------------------------------------------------------------------------------


class Server:
    """POST /classify {"picture": 3 x 32 x 32 numbers} -> {"scores": 10 numbers}."""

    def __init__(self, answer: Callable[[Picture], torch.Tensor], port: int = 0) -> None:
        self.port = port
        self._answer = answer
        self._waiting = ThreadPoolExecutor(THREADS)  # a thread waits for the device, the loop not

    async def classify(self, request: web.Request) -> web.Response:
        try:
            picture = picture_in(await request.json())
        except BAD_REQUEST as error:  # the client's mistake: the training hears nothing of it
            return web.json_response({"error": str(error)}, status=400)
        loop = asyncio.get_running_loop()
        scores = await loop.run_in_executor(self._waiting, self._answer, picture)  # sharing
        return web.json_response({"scores": scores[0].tolist()})

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread, in this block."""
        ready, loop = threading.Event(), asyncio.new_event_loop()
        over = asyncio.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                loop.run_until_complete(self._serve(ready, over))
            except BaseException as error:
                failed.append(error)
            finally:
                loop.close()
                ready.set()

        thread = threading.Thread(target=run, name="server")
        thread.start()
        ready.wait()
        if failed:
            raise failed[0]
        try:
            yield
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()
            self._waiting.shutdown()

    async def _serve(self, ready: threading.Event, over: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_post("/classify", self.classify)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, self.port).start()
            self.port = runner.addresses[0][1]  # 0 was any free one
            ready.set()
            await over.wait()
        finally:
            await runner.cleanup()


def picture_in(sent: Any) -> Picture:
    """Return the picture of a request, or raise one of BAD_REQUEST."""
    if not isinstance(sent, dict) or "picture" not in sent:
        raise ValueError('send {"picture": 3 x 32 x 32 numbers}')
    picture = torch.tensor(sent["picture"], dtype=torch.float32)
    if tuple(picture.shape) != SHAPE:
        raise ValueError(f"the picture has the shape {tuple(picture.shape)}, not {SHAPE}")
    return picture[None]


# ---- the clients ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    due: float
    """When it was to be asked. A request does not wait for the answer before it."""
    seconds: float
    """From then to the answer."""
    status: int
    scores: list[float]


class Clients:
    """Poisson arrivals at a rate, from the moment when they come until they are sent away."""

    def __init__(self, port: int, picture: Picture, rate: float, clock: Clock) -> None:
        self.replies: list[Reply] = []
        self._url = f"http://{HOST}:{port}/classify"
        self._body = {"picture": picture.tolist()}
        self._rate, self._clock, self._chance = rate, clock, random.Random(0)
        self._failed: list[BaseException] = []

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask in this block, in a thread. All have their answers when it is left."""
        thread = threading.Thread(target=self._run, name="clients")
        thread.start()
        try:
            yield
        finally:
            self._clock.gone.set()
            self._clock.come.set()
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _run(self) -> None:
        try:
            self._clock.come.wait()
            asyncio.run(self._ask())
        except BaseException as error:
            self._failed.append(error)

    async def _ask(self) -> None:
        due = time.perf_counter()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as asked:
            while not self._clock.gone.is_set():
                due += self._chance.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if not self._clock.gone.is_set():
                    asked.create_task(self._one(session, due))

    async def _one(self, session: aiohttp.ClientSession, due: float) -> None:
        async with session.post(self._url, json=self._body) as response:
            scores = (await response.json()).get("scores", [])
            self.replies.append(Reply(due, time.perf_counter() - due, response.status, scores))


# ---- all of it -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    module: Classifier
    numbers: dict[str, Any]
    replies: list[Reply]
    began: list[float]
    came_at: float


def run(
    seconds: float = 40.0, rate: float = 10.0, deadline: float = 0.1, port: int = 0,
    width: int = 32,
) -> Outcome:  # fmt: skip
    """Train and serve; the clients ask in the second half."""
    torch.manual_seed(1)
    served = resnet(16).eval()
    picture = torch.randn(1, *SHAPE)
    with torch.no_grad():
        alone = served(picture)[0].tolist()
    torch.manual_seed(2)
    module = Classifier(width)
    clock = Clock(seconds / 2, seconds)
    strategy = OffloadStrategy()  # sharing
    trainer = L.Trainer(
        strategy=strategy, callbacks=[clock], max_epochs=-1,
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with strategy.high_priority(served) as answer:  # sharing
        for _ in range(2):
            answer(picture)  # the second one is planned, so no client waits for that
        server = Server(answer, port)
        with server.running():
            print(f"POST http://{HOST}:{server.port}/classify", flush=True)
            clients = Clients(server.port, picture[0], rate, clock)
            with clients.asking():
                trainer.fit(module, batches())
        said = answer.waits.describe()
    latencies = sorted(1e3 * reply.seconds for reply in clients.replies)
    numbers = {
        "requests": len(latencies),
        "failed": sum(reply.status != 200 for reply in clients.replies),
        "answers that are not the net's alone": sum(
            reply.scores != alone for reply in clients.replies if reply.status == 200
        ),
        "late": sum(reply.seconds > deadline for reply in clients.replies),
        "deadline ms": 1e3 * deadline,
        "latency p50 ms": statistics.median(latencies) if latencies else None,
        "latency p95 ms": latencies[int(0.95 * (len(latencies) - 1))] if latencies else None,
        "steps": trainer.global_step,
        "steps a second, nobody asks": clock.steps_a_second(busy=False),
        "steps a second, clients ask": clock.steps_a_second(busy=True),
        "the gate says": said,
    }
    return Outcome(module, numbers, clients.replies, clock.began, clock.came_at)


def draw(outcome: Outcome, path: Path) -> None:
    """Latency over time, its distribution, and the training's steps in each second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start = outcome.began[0]
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    (over_time, spread), (steps, _) = axes = figure.subplots(
        2, 2, width_ratios=[4, 1], sharex="col", sharey="row"
    )
    axes[1][1].remove()
    numbers, blue, red = outcome.numbers, "#3b6ea5", "#b03a2e"
    latencies = [1e3 * reply.seconds for reply in outcome.replies]
    over_time.plot([reply.due - start for reply in outcome.replies], latencies, ".", color=blue)
    over_time.axhline(numbers["deadline ms"], color=red, linestyle="--", linewidth=1)
    over_time.set_title(
        f"{numbers['requests']} answers, {numbers['late']} after the deadline", loc="left"
    )
    over_time.set_ylabel("latency, ms")
    spread.hist(latencies, bins=30, orientation="horizontal", color=blue)
    whole = range(int(outcome.began[-1] - start))
    each = [sum(second <= at - start < second + 1 for at in outcome.began) for second in whole]
    steps.step([second + 0.5 for second in whole], each, where="mid", color=blue)
    steps.axvline(outcome.came_at - start, color=red, linestyle="--", linewidth=1)
    steps.set(ylim=(0, None), xlabel="seconds; the clients come at the red line")
    steps.set_ylabel("training steps in a second")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of training after its start")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--deadline", type=float, default=100.0, help="milliseconds")
    parser.add_argument("--width", type=int, default=32, help="channels of the trained net")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--out", type=Path, default=Path("runs/serving"))
    args = parser.parse_args()
    if args.seconds <= 0 or args.rate <= 0:
        parser.error("--seconds and --rate must be more than 0")
    outcome = run(args.seconds, args.rate, args.deadline / 1e3, args.port, args.width)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "serving.json").write_text(json.dumps(outcome.numbers, indent=1) + "\n")
    draw(outcome, args.out / "serving.png")
    print(json.dumps(outcome.numbers, indent=1))


if __name__ == "__main__":
    main()
