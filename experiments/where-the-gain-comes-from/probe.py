"""Which part of a wide residual stream helps a small decoder? Seeds of one model are trained at once.

    python probe.py tokens CORPUS.jsonl.zst HELD_OUT.jsonl.zst FOLDER
    python probe.py train FOLDER MODEL STEPS --out RESULTS [--seeds 101,102] [--rates 1]
    python probe.py time FOLDER MODEL [MODEL ...] --out RESULTS

MODEL is a list of words joined with "+":
    dense | x0 | altup | recycled | bigram | hc    the rule (bigram: a second table that only the logits read)
    K4          blocks (2 where the rule has blocks)
    sub         the rule is applied to each sublayer, not to each layer
    fixed       coefficients stay where they start (P = I, g = 1)
    reduce      a learned map K·d → d before a head of width d
    ve          value embeddings: tables of their own, added to the values of the second and the last layer but one
    f1224       width of the feed-forward layer
Every parameter has a leading axis, one entry a replica (seeds × rates). Without a GPU the model is a toy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = device == "cuda"
WIDTH, LAYERS, HEADS, FEED_FORWARD = (256, 6, 8, 768) if ON_GPU else (32, 4, 2, 48)
ROWS, LENGTH = (64, 256) if ON_GPU else (2, 32)  # of one step of one replica
VOCABULARY = 8192 if ON_GPU else 600
MUON, TABLES, HEAD, COEFFICIENTS = 0.02, 0.3, 0.006, 0.005  # learning rates; times `--rates`
RULES = ("dense", "x0", "altup", "recycled", "bigram", "hc")


def read_texts(path: str) -> list[str]:
    import pyarrow as pa

    with pa.input_stream(path, compression="zstd") as stream:
        lines = stream.read().decode().splitlines()
    return [json.loads(line)["text"] for line in lines if line.strip()]


def make_tokens(corpus: str, held_out: str, folder: str) -> None:
    """BPE from every fourth document; documents shuffled once and joined, each ended by token 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = read_texts(corpus)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<e>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[::4], trainer)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, documents in (("train", texts), ("held_out", read_texts(held_out))):
        ids = [np.array([*encoded.ids, 0], dtype=np.uint16) for encoded in tokenizer.encode_batch(documents)]
        np.random.default_rng(0).shuffle(ids)
        np.save(f"{folder}/{name}.npy", np.concatenate(ids))
        np.save(f"{folder}/{name}_documents.npy", np.repeat(np.arange(len(ids)), [len(x) for x in ids]))
        print(name, sum(map(len, ids)), "tokens", len(ids), "documents", flush=True)


def parse(model: str) -> dict:
    spec = {
        "rule": "dense",
        "K": 0,
        "sub": False,
        "fixed": False,
        "reduce": False,
        "ve": False,
        "ff": FEED_FORWARD,
    }
    for word in model.split("+"):
        if word in RULES:
            spec["rule"] = word
        elif word in ("sub", "fixed", "reduce", "ve"):
            spec[word] = True
        elif word[0] == "K":
            spec["K"] = int(word[1:])
        elif word[0] == "f":
            spec["ff"] = int(word[1:])
        else:
            raise SystemExit(f"{model}: no such word: {word}")
    spec["K"] = spec["K"] or (1 if spec["rule"] in ("dense", "x0") else 2)
    spec["wide"] = spec["rule"] in ("altup", "bigram", "hc")  # the table; the head too, unless it is reduced
    return spec


def flops(model: str) -> float:
    """Multiply-adds of a token's forward pass: matrices, causal attention, head (rules and norms left out)."""
    s, d = parse(model), WIDTH
    layer = 4 * d * d + 3 * d * s["ff"] + LENGTH * d
    wide = d * s["K"] if s["wide"] else d
    ends = wide * d + d * VOCABULARY if s["reduce"] else wide * VOCABULARY
    return LAYERS * layer + ends


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


def rotary(length, width):
    """Half of the frequencies turn, the others stand still."""
    frequency = (1 / 1024) ** torch.linspace(0, 1, width // 4, device=device)
    angle = torch.outer(torch.arange(length, device=device).float(), F.pad(frequency, (0, width // 4)))
    return angle.cos()[None, :, None].bfloat16(), angle.sin()[None, :, None].bfloat16()


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


def attention(x, w, cos_sin):
    """x [replicas, tokens, d], rows of LENGTH tokens one behind the other."""
    R, N, d = x.shape
    q, k, v = torch.bmm(norm(x), w["qkv"]).view(R * N // LENGTH, LENGTH, 3, HEADS, d // HEADS).unbind(2)
    if "value" in w:
        share = w["value_mix"].to(v.dtype)[:, None].expand(R, N // LENGTH, 2).reshape(-1, 2)
        v = share[:, 0, None, None, None] * v + share[:, 1, None, None, None] * w["value"].view(v.shape)
    q, k = turn(norm(q), *cos_sin), turn(norm(k), *cos_sin)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return torch.bmm(y.transpose(1, 2).reshape(R, N, d), w["out"])


def feed_forward(x, w):
    a, b = torch.bmm(norm(x), w["up"]).chunk(2, -1)
    return torch.bmm(F.gelu(a) * b, w["down"])


def weighted(weights, blocks):
    """Σ wⱼ xʲ, with weights [replicas, K]."""
    return sum(weights[:, None, j, None].to(x.dtype) * x for j, x in enumerate(blocks))


def altup(blocks, layer, active, w):
    """Algorithm 1."""
    predicted = [weighted(w["P"][:, i], blocks) for i in range(len(blocks))]
    found = layer(blocks[active]) - predicted[active]
    return tuple(x + w["g"][:, None, i, None].to(x.dtype) * found for i, x in enumerate(predicted))


def hyper(blocks, sublayer, w):
    """Static hyper-connections: a read, a mix and a write for each sublayer."""
    update = sublayer(weighted(w["a"], blocks))
    mixed = [weighted(w["A"][:, i], blocks) for i in range(len(blocks))]
    return tuple(x + w["b"][:, None, i, None].to(x.dtype) * update for i, x in enumerate(mixed))


def run_layer(blocks, index, rule, sub, w, cos_sin):
    K = len(blocks)

    def attend(x):
        return x + attention(x, w, cos_sin)

    def think(x):
        return x + feed_forward(x, w)

    if rule == "x0":
        x, first = blocks
        return think(attend(weighted(w["site0"]["m"], (x, first)))), first
    if rule == "hc":
        blocks = hyper(blocks, lambda x: attention(x, w, cos_sin), w["site0"])
        return hyper(blocks, lambda x: feed_forward(x, w), w["site1"])
    if rule in ("dense", "bigram"):
        return think(attend(blocks[0])), *blocks[1:]
    if not sub:
        return altup(blocks, lambda x: think(attend(x)), index % K, w["site0"])
    blocks = altup(blocks, attend, 2 * index % K, w["site0"])
    return altup(blocks, think, (2 * index + 1) % K, w["site1"])


def losses(blocks, head, reduce, targets, joined):
    """[replicas, tokens]"""
    x = norm(torch.cat(blocks, -1) if joined else sum(blocks))
    if reduce is not None:
        x = norm(torch.bmm(x, reduce))
    scores = torch.bmm(x, head).float()
    return torch.logsumexp(scores, -1) - scores.gather(-1, targets[..., None])[..., 0]


class Replicas:
    """The model; `matrices` are Muon's, `others` are (parameter, learning rate) of Adam."""

    def __init__(self, model: str, seeds: list[int]) -> None:
        self.spec = s = parse(model)
        d, K, R = WIDTH, s["K"], len(seeds)
        self.replicas, self.matrices, self.others = R, [], []
        generators = [torch.Generator(device).manual_seed(1000 + seed) for seed in seeds]

        def drawn(shape, std, rate=None):
            x = torch.stack([torch.randn(shape, generator=g, device=device) * std for g in generators])
            (self.matrices if rate is None else self.others).append(x if rate is None else (x, rate))
            return x.requires_grad_()

        def start(values, rate=COEFFICIENTS):
            x = values.to(device).float().expand(R, *values.shape).clone()
            if not s["fixed"]:
                self.others.append((x.requires_grad_(), rate))
            return x

        # Layers draw first: models of other tables then have equal layers, which pairs them.
        self.layers = []
        for layer in range(LAYERS):
            w = {"qkv": drawn((d, 3 * d), d**-0.5), "out": drawn((d, d), 0.2 * d**-0.5)}
            w |= {"up": drawn((d, 2 * s["ff"]), d**-0.5), "down": drawn((s["ff"], d), 0.2 * s["ff"] ** -0.5)}
            sites = {"dense": 0, "bigram": 0, "x0": 1, "hc": 2}.get(s["rule"], 2 if s["sub"] else 1)
            for site in range(sites):
                if s["rule"] == "x0":
                    w[f"site{site}"] = {"m": start(torch.tensor([1.0, 0.0]))}
                elif s["rule"] == "hc":
                    read = F.one_hot(torch.tensor((2 * layer + site) % K), K)
                    w[f"site{site}"] = {"a": start(read), "b": start(torch.ones(K)), "A": start(torch.eye(K))}
                else:
                    w[f"site{site}"] = {"P": start(torch.eye(K)), "g": start(torch.ones(K))}
            self.layers.append(w)
        self.tables = [drawn((VOCABULARY, d), 1.0, TABLES) for _ in range(K if s["wide"] else 1)]
        for layer in (1, LAYERS - 2) if s["ve"] else ():
            self.layers[layer] |= {"value_table": drawn((VOCABULARY, d), 1.0, TABLES)}
            self.layers[layer]["value_mix"] = start(torch.tensor([0.5, 0.5]))
        self.joined = s["wide"]
        self.reduce = drawn((d * K, d), (d * K) ** -0.5) if s["reduce"] else None
        width = d * K if s["wide"] and not s["reduce"] else d
        self.head = torch.zeros(R, width, VOCABULARY, device=device).requires_grad_()
        self.others.append((self.head, HEAD if ON_GPU else 0.02))
        self.cos_sin = rotary(LENGTH, d // HEADS)
        compiled = (lambda f: torch.compile(f, dynamic=False)) if ON_GPU else (lambda f: f)
        self.run_layer, self.losses = compiled(run_layer), compiled(losses)

    def parameters(self) -> int:
        return sum(x[0].numel() for x in self.matrices) + sum(x[0].numel() for x, _ in self.others)

    def look_up(self, table, tokens):
        return torch.stack([F.embedding(tokens[r], table[r]) for r in range(self.replicas)]).bfloat16()

    def __call__(self, tokens, targets):
        """Losses [replicas, tokens] of `tokens` [replicas, tokens]."""
        s = self.spec
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = tuple(norm(self.look_up(table, tokens)) for table in self.tables)
            if s["rule"] == "recycled":
                blocks *= s["K"]
            if s["rule"] == "x0":
                blocks *= 2
            for index, w in enumerate(self.layers):
                given = {name: x for name, x in w.items() if name != "value_table"}
                if "value_table" in w:
                    given["value"] = self.look_up(w["value_table"], tokens)
                # One compiled layer for each active block, not one for each layer.
                blocks = self.run_layer(blocks, index % s["K"], s["rule"], s["sub"], given, self.cos_sin)
            blocks = blocks[:1] if s["rule"] == "x0" else blocks
            return self.losses(blocks, self.head, self.reduce, targets, self.joined)


def orthogonal(gradient, steps=5):
    """Newton-Schulz iterations of Muon."""
    X = gradient.bfloat16()
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.mT if tall else X


class Optimizer:
    """Muon for matrices (momentum 0.95, Nesterov), Adam (0.9, 0.95) for the rest."""

    def __init__(self, model: Replicas, rates: torch.Tensor) -> None:
        self.model, self.rates, self.steps = model, rates, 0
        self.momentum = [torch.zeros_like(x) for x in model.matrices]
        self.first = [torch.zeros_like(x) for x, _ in model.others]
        self.second = [torch.zeros_like(x) for x, _ in model.others]
        self.groups: dict = {}
        for index, x in enumerate(model.matrices):
            self.groups.setdefault(x.shape, []).append(index)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        self.steps += 1
        matrices, others = self.model.matrices, [x for x, _ in self.model.others]
        for shape, members in self.groups.items():
            gradient = torch.stack([matrices[i].grad for i in members])
            momentum = torch.stack([self.momentum[i] for i in members]).lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95)).float() * max(1, shape[-1] / shape[-2]) ** 0.5
            for place, i in enumerate(members):
                self.momentum[i].copy_(momentum[place])
                matrices[i].sub_(update[place] * (MUON * factor * self.rates)[:, None, None])
        gradients = [x.grad for x in others]
        torch._foreach_lerp_(self.first, gradients, 0.1)
        torch._foreach_mul_(self.second, 0.95)
        torch._foreach_addcmul_(self.second, gradients, gradients, 0.05)
        spread = torch._foreach_div(self.second, 1 - 0.95**self.steps)
        torch._foreach_sqrt_(spread)
        torch._foreach_add_(spread, 1e-10)
        for (x, rate), update in zip(self.model.others, torch._foreach_div(self.first, spread), strict=True):
            size = rate * factor / (1 - 0.9**self.steps) * self.rates
            x.sub_(update * size.view(-1, *[1] * (x.dim() - 1)))
        for x in matrices + others:
            x.grad = None


def load(folder: str, name: str) -> torch.Tensor:
    return torch.from_numpy(np.load(f"{folder}/{name}.npy").astype(np.int32)).to(device)


class Data:
    """Training rows in the order of each seed, held-out rows in the order of the text."""

    def __init__(self, folder: str, seeds: list[int]) -> None:
        self.text, self.held_out = load(folder, "train"), load(folder, "held_out")
        rows = (len(self.text) - 1) // LENGTH
        orders = {seed: np.random.default_rng(seed).permutation(rows) for seed in set(seeds)}
        self.orders = torch.from_numpy(np.stack([orders[seed] for seed in seeds])).to(device)
        self.within = torch.arange(LENGTH, device=device)
        self.seeds = seeds

    def batch(self, step: int):
        rows = self.orders[:, step * ROWS : (step + 1) * ROWS]
        assert rows.shape[1] == ROWS, "the text is read once, and is too short for so many steps"
        return self.rows(self.text, rows)

    def rows(self, text, rows):
        positions = rows[..., None] * LENGTH + self.within
        return text[positions].flatten(1).long(), text[positions + 1].flatten(1).long()

    @torch.no_grad()
    def evaluate(self, model: Replicas) -> torch.Tensor:
        """Mean loss of each held-out row: [replicas, rows]."""
        parts = []
        for start in range(0, (len(self.held_out) - 1) // LENGTH // ROWS * ROWS, ROWS):
            rows = torch.arange(start, start + ROWS, device=device).expand(len(self.seeds), -1)
            loss = model(*self.rows(self.held_out, rows))
            parts.append(loss.unflatten(1, (ROWS, LENGTH)).mean(-1))
        return torch.cat(parts, 1)


def schedule(step: int, steps: int) -> float:
    """Warm-up of 100 steps, a linear fall over the last 70 %."""
    return min(1, (step + 1) / 100) * min(1, (steps - step) / (0.7 * steps))


def train(folder, name, steps, seeds, rates, out) -> None:
    pairs = [(rate, seed) for rate in rates for seed in seeds]
    all_seeds = [seed for _, seed in pairs]
    torch.manual_seed(0)
    data, model = Data(folder, all_seeds), Replicas(name, all_seeds)
    optimizer = Optimizer(model, torch.tensor([rate for rate, _ in pairs], device=device))
    began, curve = time.time(), []
    for step in range(steps):
        model(*data.batch(step)).mean(1).sum().backward()
        optimizer.step(schedule(step, steps))
        done = step + 1
        if done % max(1, steps // 20) == 0 or done == steps:
            rows = data.evaluate(model)
            curve.append((done, rows.mean(1).tolist()))
            if done % max(1, steps // 4) == 0:
                print(name, done, f"{time.time() - began:.0f} s", f"{rows.mean():.4f}", flush=True)
    Path(out).mkdir(parents=True, exist_ok=True)
    stem = f"{out}/{name}-{steps}"
    np.save(f"{stem}.npy", rows.cpu().numpy().astype(np.float32))
    final = [round(x, 5) for x in rows.mean(1).tolist()]
    record = {"model": name, "steps": steps, "pairs": pairs, "final": final, "curve": curve}
    record |= {"parameters": model.parameters(), "flops": flops(name), "seconds": time.time() - began}
    Path(f"{stem}.json").write_text(json.dumps(record))
    print("final", name, steps, f"{np.mean(final):.4f}", final, flush=True)


def measure(folder, names, seeds, out) -> None:
    """Milliseconds of a step of all replicas, with nothing else on the GPU: median of five rounds in turns."""
    data, models = Data(folder, seeds), {}
    for name in names:
        model = Replicas(name, seeds)
        models[name] = model, Optimizer(model, torch.ones(len(seeds), device=device))

    def steps(name, count):
        model, optimizer = models[name]
        for step in range(count):
            model(*data.batch(step)).mean(1).sum().backward()
            optimizer.step(0.01)
        if ON_GPU:
            torch.cuda.synchronize()

    times = {name: [] for name in names}
    for round_ in range(6):
        for name in names:
            began = time.perf_counter()
            steps(name, 6 if ON_GPU else 1)
            if round_:  # the first compiles
                times[name].append((time.perf_counter() - began) / (6 if ON_GPU else 1) * 1e3)
    result = {name: {"ms": float(np.median(x)), "all": x, "flops": flops(name)} for name, x in times.items()}
    Path(out).mkdir(parents=True, exist_ok=True)
    Path(f"{out}/times.json").write_text(json.dumps(result))
    for name, x in result.items():
        print(f"{name:28} {x['ms']:8.2f} ms  {x['flops'] / 1e6:6.2f} M multiply-adds a token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("tokens", "train", "time", "flops"))
    parser.add_argument("words", nargs="+")
    parser.add_argument("--out", default="results")
    parser.add_argument("--seeds", default="101,102,103,104,105,106,107,108")
    parser.add_argument("--rates", default="1")
    given = parser.parse_args()
    seeds, rates = [int(x) for x in given.seeds.split(",")], [float(x) for x in given.rates.split(",")]
    if given.verb == "tokens":
        make_tokens(*given.words)
    elif given.verb == "train":
        folder, name, steps = given.words
        train(folder, name, int(steps), seeds, rates, given.out)
    elif given.verb == "time":
        measure(given.words[0], given.words[1:], seeds, given.out)
    else:
        for name in given.words:
            ratio = flops(name) / flops("dense")
            print(f"{name:28} {flops(name) / 1e6:.3f} M multiply-adds a token, {ratio:.4f} of dense")


if __name__ == "__main__":
    main()
