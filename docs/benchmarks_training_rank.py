"""One rank of `make bench-training`: data-parallel training of a small language model, one allreduce a step.

    mpiexec -n 8 python docs/benchmarks_training_rank.py ASKED.json

The model is a causal transformer over words; the text is the language reference that every Python has
(`pydoc_data.topics`). A rank computes the gradient of its own windows of the text, in one flat buffer; the buffer is
averaged over the ranks; every rank takes the same step of AdamW. See benchmarks_training.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from taccl import ErrorFeedback, Job, open_collective

WINDOW = 32  # words that the model sees at once
WINDOWS = 4  # of a rank in one step
WIDTH = 192
HEADS = 4
BLOCKS = 2
RATE = 3e-3  # of learning, at its highest
WARMUP = 20  # steps
HELD_OUT = 10  # of so many paragraphs one is
LAST = 20  # steps whose training loss is reported, as their mean
FEEDBACK = "+feedback"  # behind a program's name: with error feedback
MPI = "mpi"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Text:
    """Words as numbers; 0 is any word that the training part does not have."""

    training: Array  # (n,) int64
    held_out: Array
    vocabulary: int


def text() -> Text:
    """The paragraphs of the language reference, each once (topics repeat each other); every tenth one is held out.

    Of those only what has no lines drawn with signs: rows of dashes are easily predicted, and few tables have most.
    """
    paragraphs = list(
        dict.fromkeys(part.strip() for name in sorted(topics) for part in topics[name].split("\n\n"))
    )
    words = [re.findall(r"\w+|[^\w\s]", paragraph.lower()) for paragraph in paragraphs]
    drawn = [re.search(r"([-=+*])\1\1\1", paragraph) for paragraph in paragraphs]
    held_out = [word for at in range(0, len(words), HELD_OUT) if not drawn[at] for word in words[at]]
    training = [word for number, paragraph in enumerate(words) if number % HELD_OUT for word in paragraph]
    numbers = {word: number for number, word in enumerate(sorted(set(training)), 1)}
    coded = [np.array([numbers.get(word, 0) for word in part], np.int64) for part in (training, held_out)]
    return Text(coded[0], coded[1], len(numbers) + 1)


class Block(nn.Module):
    """Attention to the words before, and two layers, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(windows, WINDOW, WIDTH) to the same."""
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        heads = (part.view(shape).transpose(1, 2) for part in self.mix(self.first(x)).split(WIDTH, 2))
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(functional.gelu(self.wide(self.second(x))))


class Model(nn.Module):
    """The next word after each of a window. Parameters and gradients are flat; `gradient` is the caller's memory."""

    def __init__(self, vocabulary: int, seed: int, gradient: Array | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        own = list(self.parameters())
        elements = sum(parameter.numel() for parameter in own)
        self.gradient = np.zeros(elements, np.float32) if gradient is None else gradient
        self.flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in own]))
        self.flat.grad = torch.from_numpy(self.gradient)
        first = 0
        for parameter in own:
            last = first + parameter.numel()
            parameter.data = self.flat.data[first:last].view_as(parameter)
            parameter.grad = self.flat.grad[first:last].view_as(parameter)
            first = last
        self.steps = torch.optim.AdamW([self.flat], lr=RATE, betas=(0.9, 0.98), fused=True)

    def loss(self, windows: Array) -> torch.Tensor:
        """Mean of -ln p of the words 1 to WINDOW of (windows, WINDOW + 1) numbers."""
        numbers = torch.from_numpy(windows)
        x = self.words(numbers[:, :-1]) + self.places.weight
        return functional.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), numbers[:, 1:].flatten())

    def compute_gradient(self, windows: Array) -> float:
        """Fill the flat gradient; the loss."""
        self.gradient[:] = 0
        loss = self.loss(windows)
        loss.backward()
        return float(loss.detach())

    def step(self, number: int, steps: int) -> None:
        """One step of AdamW with the flat gradient; its rate rises, and falls to 0 as a cosine."""
        rate = RATE * min(1.0, (number + 1) / WARMUP) * (1 + math.cos(math.pi * number / steps)) / 2
        self.steps.param_groups[0]["lr"] = rate
        self.steps.step()

    def digest(self) -> str:
        """Of the parameters' bits."""
        return hashlib.sha256(self.flat.detach().numpy().tobytes()).hexdigest()


def windows_of(words: Array, seed: int, step: int, rank: int, ranks: int) -> Array:
    """(WINDOWS, WINDOW + 1): this rank's part of the step's windows, which depend on seed and step alone."""
    starts = np.random.default_rng((seed, step)).integers(0, len(words) - WINDOW, (ranks, WINDOWS))
    return words[starts[rank][:, None] + np.arange(WINDOW + 1)]


class Averages:
    """How gradients are averaged, by mode: over one flat buffer that all modes share."""

    def __init__(self, job: Job, programs: dict[str, str], modes: list[str], elements: int) -> None:
        self.job = job
        self.buffer = np.zeros(elements, np.float32)
        self.calls: dict[str, Any] = {}
        self.feedback: dict[str, ErrorFeedback] = {}
        for mode in modes:
            if mode == MPI:
                self.calls[mode] = self._mpi
                continue
            if mode.endswith(FEEDBACK):
                self.feedback[mode] = ErrorFeedback(elements)
            self.calls[mode] = open_collective(
                job, programs[mode.removesuffix(FEEDBACK)], self.buffer, self.buffer, op="avg",
                feedback=self.feedback.get(mode),
            )  # fmt: skip

    def _mpi(self) -> None:
        """The MPI library's own."""
        with self.job.waiting("it is inside MPI's own allreduce"):
            self.job.control.Allreduce(self.job.MPI.IN_PLACE, self.buffer)
        self.buffer /= self.job.ranks

    def coded_bytes(self, mode: str) -> tuple[int, int]:
        """Of all ranks: bytes of values that were coded in the last step, and of their frames."""
        mine = (0, 0) if mode == MPI else self.calls[mode].coded_bytes
        found = self.job.reduce(np.array(mine, np.int64), "sum")
        return int(found[0]), int(found[1])

    def close(self) -> None:
        """Free the collectives."""
        for mode, call in self.calls.items():
            if mode != MPI:
                call.close()


def alike(job: Job, model: Model) -> str:
    """The digest of the parameters. Raises ValueError when ranks have different ones."""
    mine = model.digest()
    everyone = job.gather_bytes(np.frombuffer(mine.encode(), np.uint8), "the comparison of parameters")
    if (everyone != everyone[0]).any():
        raise ValueError("ranks have different parameters")
    return mine


def measure_time(job: Job, asked: dict[str, Any], words: Text) -> dict[str, Any]:
    """Modes take turns, each training a model of its own: (turns, modes, 3) seconds and the models' digests.

    The seconds are of a whole iteration from the first rank's begin to the last one's end, of its communication from
    when the last rank has its gradient until all have the average, and of the slowest rank's own gradient. The ranks
    share one machine and so one clock.
    """
    modes, turns, warmup = asked["modes"], asked["turns"], asked["warmup"]
    averages = Averages(job, asked["programs"], modes, len(Model(words.vocabulary, 0).gradient))
    models = {mode: Model(words.vocabulary, asked["seeds"][0], averages.buffer) for mode in modes}
    marks = np.zeros((turns, len(modes), 4))
    for turn in range(turns):
        windows = windows_of(words.training, asked["seeds"][0], turn, job.rank, job.ranks)
        for index, mode in enumerate(modes):
            model = models[mode]
            job.barrier()
            begin = time.perf_counter()
            model.compute_gradient(windows)
            computed = time.perf_counter()
            averages.calls[mode]()
            averaged = time.perf_counter()
            model.step(turn, asked["steps"])
            marks[turn, index] = begin, computed, averaged, time.perf_counter()
    last = job.reduce(marks, "max")
    first = -job.reduce(-marks, "max")
    gradient = job.reduce(marks[..., 1] - marks[..., 0], "max")
    seconds = np.stack([last[..., 3] - first[..., 0], last[..., 2] - last[..., 1], gradient], -1)
    found = {
        "seconds": seconds[warmup:].tolist(),
        "digests": {mode: alike(job, models[mode]) for mode in modes},
        "coded_bytes": {mode: averages.coded_bytes(mode) for mode in modes},
        "elements": len(averages.buffer),
    }
    averages.close()
    return found


def measure_loss(job: Job, asked: dict[str, Any], words: Text) -> dict[str, Any]:
    """Train with each mode and seed: the losses, and digests after as many steps as turns are timed."""
    modes, steps = asked["modes"], asked["steps"]
    averages = Averages(job, asked["programs"], modes, len(Model(words.vocabulary, 0).gradient))
    found: dict[str, Any] = {mode: [] for mode in modes}
    digests: dict[str, str] = {}
    for seed in asked["seeds"]:
        for mode in modes:
            model = Model(words.vocabulary, seed, averages.buffer)
            if mode in averages.feedback:
                averages.feedback[mode].residual[:] = 0
            losses = np.zeros(steps)
            for step in range(steps):
                windows = windows_of(words.training, seed, step, job.rank, job.ranks)
                losses[step] = model.compute_gradient(windows)
                averages.calls[mode]()
                model.step(step, steps)
                if step + 1 == asked["turns"] and seed == asked["seeds"][0]:
                    digests[mode] = alike(job, model)
            alike(job, model)
            curve = job.reduce(losses, "sum") / job.ranks
            found[mode].append(
                {"training": float(curve[-LAST:].mean()), "held_out": held_out(job, model, words)}
            )
            if job.rank == 0:
                print(f"seed {seed}, {mode}: {found[mode][-1]}", file=sys.stderr, flush=True)
    coded = {mode: averages.coded_bytes(mode) for mode in modes}
    averages.close()
    return {"losses": found, "digests": digests, "coded_bytes": coded}


def held_out(job: Job, model: Model, words: Text) -> float:
    """The mean loss over the held-out words in windows one after the other; each rank takes every ranks-th."""
    count = (len(words.held_out) - 1) // WINDOW
    starts = np.arange(job.rank, count, job.ranks) * WINDOW
    windows = words.held_out[starts[:, None] + np.arange(WINDOW + 1)]
    with torch.no_grad():
        mine = np.array([float(model.loss(windows)) * len(windows), len(windows)])
    total = job.reduce(mine, "sum")
    return float(total[0] / total[1])


def save_gradient(path: Path, steps: int) -> int:
    """Write the gradient of two ranks after some steps, on which codecs are measured; how many values it has."""
    words = text()
    model = Model(words.vocabulary, 0)
    for step in range(steps + 1):
        model.compute_gradient(
            np.concatenate([windows_of(words.training, 0, step, rank, 2) for rank in range(2)])
        )
        if step < steps:
            model.step(step, 10 * steps)
    np.save(path, model.gradient)
    return len(model.gradient)


def main() -> None:
    """Do what the file asks for; rank 0 writes what was found."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    with Job(120.0) as job:
        measure = {"time": measure_time, "loss": measure_loss}[asked["what"]]
        found = measure(job, asked, text())
        if job.rank == 0:
            Path(asked["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
