"""The rows of the table of all benchmarks: what each runs, what is read of that, and the aims.

A row runs benchmarks as processes that print JSON on stdout. `{folder}` in a command is a folder that the commands of
one invocation share; a command that two rows have runs once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.full.measures import Measure, Row, Run, Values
from benchmarks.full.results import Value
from benchmarks.learning.convergence import AUTO, SYNCHRONOUS
from benchmarks.models import flow
from benchmarks.models.time_to_loss import SPLIT, SYNCHRONOUS_LOOKAHEAD

# L: learning ----------------------------------------------------------------------------------------------------------

LOSSES = Run(
    "benchmarks.learning.convergence --short --save {folder}/losses.json",
    "--seeds 1 --steps 160 --rates 4e-3",
    "--seeds 3 --steps 240 --rates 2e-3 4e-3 8e-3",
)
TIMES = Run("benchmarks.models.time_to_loss {folder}/losses.json --output json")
BUBBLES = {"2": 0.11, "4": 0.27, "8": 0.47}  # by number of stages; the aims are for 10, 25 and 50 %
CHOSEN = {"2": "a quarter late", "4": AUTO, "8": AUTO}  # by pipeline.overlap = "auto", at these numbers of stages
AIMS_SYNCHRONOUS, AIMS_ADAMW = {"2": 1.08, "4": 1.2, "8": 1.3}, {"2": 1.2, "4": 1.35, "8": 1.5}
OPPONENTS = {
    "ours": ("our best synchronous", SYNCHRONOUS_LOOKAHEAD.name, AIMS_SYNCHRONOUS),
    "adamw": ("synchronous AdamW", SYNCHRONOUS.name, AIMS_ADAMW),
    "split": ("our best synchronous, backwards split", SPLIT, dict.fromkeys(BUBBLES)),
}
LINK_LOSS = Run(
    "benchmarks.learning.loss_over_link --link 100:20 --output json", "--seeds 1 --steps 160", "--seeds 3 --steps 240"
)


def _l1_measures() -> list[Measure]:
    modelled = [
        Measure(
            f"{stages}/{goal}/{key}",
            f"to the loss at {goal} of the tokens, {stages} stages (bubble {bubble:.0%})",
            name,
            aims[stages],
        )
        for stages, bubble in BUBBLES.items()
        for goal in ("75%", "100%")
        for key, (name, _, aims) in OPPONENTS.items()
    ]
    return [
        *modelled,
        Measure("link/75%", "to the loss at 75% of the steps, 100 Mbit/s, RTT 20 ms", "1F1B", 1.4),
        Measure("link/100%", "to the loss at 100% of the steps, 100 Mbit/s, RTT 20 ms", "1F1B", 1.4),
    ]


def _read_l1(printed: Sequence[Any]) -> Values:
    _, modelled, link = printed
    values: Values = {}
    for stages, goals in modelled["times"].items():
        for goal, ways in goals.items():
            for key, (_, name, _) in OPPONENTS.items():
                pairs = zip(ways[name], ways[CHOSEN[stages]], strict=True)
                values[f"{stages}/{goal}/{key}"] = [_quotient(theirs, ours) for theirs, ours in pairs]
    for place, goal in enumerate(("75%", "100%")):
        seconds = [seed["seconds"][place] for seed in link["seeds"]]
        values[f"link/{goal}"] = [_quotient(theirs, ours) for ours, theirs in seconds]
    return values


def _read_l2(printed: Sequence[Any]) -> Values:
    losses = printed[1]["losses"]
    pairs = list(zip(losses[AUTO], losses[SYNCHRONOUS.name], strict=True))
    return {"loss": [100.0 * (ours / theirs - 1.0) for ours, theirs in pairs]}


def _quotient(one: Value, other: Value) -> Value:
    """None if either never came to its end."""
    return None if one is None or other is None else one / other


# P1, P3: tokens per second --------------------------------------------------------------------------------------------

TORCH = ("gpipe", "1f1b", "interleaved", "zbv")
SPEED = "benchmarks.measured.throughput --output json"
P1_WAYS = ",".join(("local", "swarm", "overlap", *TORCH))
MODELS = {"compute": "--width 256 --layers 8 --sequence 128", "overhead": "--width 64 --layers 4 --sequence 32"}
QUICK = {"compute": "--rounds 2 --steps 6 --microbatch 2", "overhead": "--rounds 3 --steps 10 --microbatch 2"}
P1 = [Run(f"{SPEED} --ways {P1_WAYS} {shape}", QUICK[model], "--rounds 7 --steps 4") for model, shape in MODELS.items()]
MODEL_TEXTS = {"compute": "computing dominates", "overhead": "overhead shows"}
# As long for a microbatch, and as many bytes between stages, as with "compute", but hardly any computing.
MODELLED = "--width 64 --layers 4 --sequence 512 --microbatch 2 --compute 0.04"
MODELLED_WAYS = ",".join(("swarm", "overlap", *TORCH))
P1M = [Run(f"{SPEED} --ways {MODELLED_WAYS} {MODELLED}", "--rounds 3 --steps 6", "--rounds 7 --steps 10")]
P1M_TEXTS = {"modelled": "modelled compute"}
P1M4_WAYS = "swarm,whole,overlap,wholelap,1f1b,zbv"
P1M4_SHAPE = "--stages 4 --width 64 --layers 8 --sequence 64 --microbatch 2 --compute 0.08 --warmup 3"
P1M4 = [Run(f"{SPEED} --ways {P1M4_WAYS} {P1M4_SHAPE}", "--rounds 2 --steps 5", "--rounds 7 --steps 10")]
P1M4_MEASURES = [
    Measure("swarm/1f1b", "tokens/s without overlap, 4 stages, modelled compute", "1F1B", 1.12),
    Measure("swarm/zbv", "tokens/s without overlap, 4 stages, modelled compute", "ZBV", 0.95),
    Measure("swarm/whole", "tokens/s without overlap, 4 stages, modelled compute", "no backward split"),
    Measure("overlap/1f1b", "tokens/s with overlap, 4 stages, modelled compute", "1F1B", 1.35),
    Measure("overlap/wholelap", "tokens/s with overlap, 4 stages, modelled compute", "no backward split"),
]


def _p1_measures(texts: Mapping[str, str], *more: str) -> list[Measure]:
    return [
        measure
        for model, text in texts.items()
        for measure in (
            Measure(f"{model}/overlap/1f1b", f"tokens/s with overlap, {text}", "1F1B", 1.1),
            Measure(f"{model}/overlap/best", f"tokens/s with overlap, {text}", "the best of torch's", 1.0),
            Measure(f"{model}/swarm/1f1b", f"tokens/s without overlap, {text}", "1F1B", 0.97),
            *(Measure(f"{model}/overlap/{way}", f"tokens/s with overlap, {text}", "one process") for way in more),
        )
    ]


def _read_p1(texts: Mapping[str, str], more: Sequence[str], printed: Sequence[Any]) -> Values:
    values: Values = {}
    for model, found in zip(texts, printed, strict=True):
        for turn in found["rounds"]:
            speeds = _speeds(turn)
            speeds["best"] = max(speeds[way] for way in TORCH)
            pairs = (("overlap", "1f1b"), ("overlap", "best"), ("swarm", "1f1b"), *(("overlap", way) for way in more))
            for way, other in pairs:
                values.setdefault(f"{model}/{way}/{other}", []).append(speeds[way] / speeds[other])
    return values


def _read_p1m4(printed: Sequence[Any]) -> Values:
    values: Values = {measure.key: [] for measure in P1M4_MEASURES}
    for turn in printed[0]["rounds"]:
        speeds = _speeds(turn)
        for key, ratios in values.items():
            way, _, other = key.partition("/")
            ratios.append(speeds[way] / speeds[other])
    return values


def _speeds(turn: Mapping[str, Any]) -> dict[str, float]:
    return {way: timed["tokens_per_s"] for way, timed in turn["ways"].items()}


@dataclass(frozen=True, slots=True)
class _Link:
    """A row's run through one link."""

    link: str  # Mbit/s : ms there and back
    text: str
    flags: str = ""

    @property
    def key(self) -> str:
        return f"{self.link} {self.flags}".strip()


LINKS = (
    _Link("100:20", "100 Mbit/s, 20 ms"),
    _Link("50:100", "50 Mbit/s, 100 ms"),
    _Link("1000:200", "1 Gbit/s, 200 ms"),
)
# Steps of 16 microbatches in place of 8, where a step of 8 is shorter than what it waits for.
LONG_STEPS = tuple(
    _Link(link.link, f"{link.text}, 16 microbatches", "--microbatches 16") for link in LINKS if link.link != "100:20"
)
P3_WAYS = ("overlap", "int8", "1f1b", "zbv", "loopback")
P3 = {
    model: [
        Run(f"{SPEED} --ways {','.join(P3_WAYS)} --link {link.key} {shape}", QUICK[model], "--rounds 5 --steps 6")
        for link in LINKS
    ]
    for model, shape in MODELS.items()
}
P3M_LINKS = (*LINKS, *LONG_STEPS)
P3M = [
    Run(
        f"{SPEED} --ways {','.join(P3_WAYS)} --link {link.key} {MODELLED}",
        "--rounds 2 --steps 6",
        "--rounds 5 --steps 10",
    )
    for link in P3M_LINKS
]


def _p3_measures(links: Sequence[_Link], more: str = "") -> list[Measure]:
    return [
        measure
        for link in links
        for text, far in ((link.text + more, link.link == "50:100"),)
        for measure in (
            Measure(f"{link.key}/overlap/loopback", f"tokens/s through {text}", "loopback", 0.95),
            Measure(f"{link.key}/overlap/1f1b", f"tokens/s through {text}", "1F1B", 2.2 if far else 1.5),
            Measure(f"{link.key}/int8/1f1b", f"tokens/s through {text}, int8", "1F1B", 2.2 if far else 1.7),
            Measure(f"{link.key}/overlap/zbv", f"tokens/s through {text}", "ZBV"),
        )
    ]


def _read_p3(links: Sequence[_Link], printed: Sequence[Any]) -> Values:
    values: Values = {}
    for link, found in zip(links, printed, strict=True):
        for turn in found["rounds"]:
            speeds = _speeds(turn)
            for way, other in (("overlap", "loopback"), ("overlap", "1f1b"), ("int8", "1f1b"), ("overlap", "zbv")):
                values.setdefault(f"{link.key}/{way}/{other}", []).append(speeds[way] / speeds[other])
    return values


# P2, P7: unequal replicas, deaths, joiners ----------------------------------------------------------------------------

UNEQUAL = "benchmarks.measured.unequal_processes --output json"
# Seconds of a forward at speed 1, and what the figures are called then.
LENGTHS = {"long": (0.25, ""), "short": (0.1, ", short computations")}
P2_WAYS = {
    "late": ("--overlap 0.5", ", half late", 0.96),
    "synchronous": ("--overlap 0", ", synchronous", 0.92),
    "links": ("--overlap 0.5 --links 20:40,50:20,100:5", " on unequal links, half late", 0.96),
}
P2 = [
    Run(f"{UNEQUAL} --speeds 1,2,4 {flags} --compute {compute_s:g}", "--steps 6", "--steps 30")
    for compute_s, _ in LENGTHS.values()
    for flags, _, _ in P2_WAYS.values()
]
P2_MEASURES = tuple(
    Measure(f"{length}/{way}", f"replicas at 1:2:4{text}{more}", "the sum of their speeds", aim)
    for length, (_, more) in LENGTHS.items()
    for way, (_, text, aim) in P2_WAYS.items()
)


def _read_p2(printed: Sequence[Any]) -> Values:
    return {measure.key: found["kept"] for measure, found in zip(P2_MEASURES, printed, strict=True)}


CHURN = "benchmarks.measured.churn_processes --stages 3 --replicas 4 --rates 0 --every 15 --away 20 --output json"
CHURN_SEEDS = range(2)
P7 = [
    run
    for compute_s, _ in LENGTHS.values()
    for run in (
        *(Run(f"{CHURN} --compute {compute_s:g} --seed {n}", "--minutes 0.6", "--minutes 3") for n in CHURN_SEEDS),
        Run(f"{UNEQUAL} --speeds 1,1,1,0.1 --microbatches 25 --compute {compute_s:g}", "--steps 4", "--steps 20"),
        Run(f"{UNEQUAL} --speeds 1,1,1,0.1 --microbatches 64 --compute {compute_s:g}", "--steps 3", "--steps 20"),
        Run(f"{UNEQUAL} --speeds 1,1,1 --stages 2 --join --compute {compute_s:g} --runs 3", "--steps 6", "--steps 20"),
    )
]
SLOW = "one replica of four 10 times slower"
P7_MEASURES = tuple(
    measure
    for length, (_, more) in LENGTHS.items()
    for measure in (
        Measure(f"{length}/kills", f"kill -9 every 15 s{more}", "undisturbed, by those alive", 0.9),
        Measure(f"{length}/slow", f"{SLOW}, due 0.8 of 25 microbatches{more}", "the sum of their speeds", 0.9),
        Measure(f"{length}/slow/64", f"{SLOW}, due 2 of 64 microbatches{more}", "the sum of their speeds", 0.9),
        Measure(f"{length}/join", f"while a peer joins{more}", "before", 0.97),
    )
)


def _read_p7(printed: Sequence[Any]) -> Values:
    values: Values = {}
    runs = len(printed) // len(LENGTHS)
    for number, length in enumerate(LENGTHS):
        *churn, few, many, join = printed[number * runs : (number + 1) * runs]
        kills = [deadly["kept"] / calm["kept"] for calm, deadly in churn]
        found = {"kills": kills, "slow": few["kept"], "slow/64": many["kept"], "join": join["joins"]}
        values |= {f"{length}/{key}": shares for key, shares in found.items()}
    return values


# P4, P5, P6: the parts ------------------------------------------------------------------------------------------------

P4 = [Run("benchmarks.measured.dataplane --output json", "--seconds 0.3 --repeats 7", "--seconds 0.5 --repeats 15")]
P4_MEASURES = (
    Measure("64 KiB", "64 KiB, the best of 4 and 8 in flight", "", 0.6, unit="GB/s"),
    Measure("1 MiB", "1 MiB, the best of 4 and 8 in flight", "plain TCP", 0.6),
)


def _read_p4(printed: Sequence[Any]) -> Values:
    (sizes,) = printed

    def best(size: str) -> list[float]:
        ways = [[timed["gigabytes_per_s"] for timed in sizes[size][f"gRPC, {count} in flight"]] for count in (4, 8)]
        return [max(pair) for pair in zip(*ways, strict=True)]

    plain = [size["gigabytes_per_s"] for size in sizes["1 MiB"]["TCP sendall"]]
    return {
        "64 KiB": list(best("64 KiB")),
        "1 MiB": [ours / tcp for ours, tcp in zip(best("1 MiB"), plain, strict=True)],
    }


P5 = [
    Run("benchmarks.measured.averaging --members 4 --mib 16 --output json", "--rounds 7", "--rounds 21"),
    Run("benchmarks.measured.averaging --access 100,100,100,100 --mib 4 --output json", "--rounds 5", "--rounds 11"),
    Run("benchmarks.measured.averaging --access 100,100,100,25 --mib 4 --output json", "--rounds 5", "--rounds 11"),
]
P5_MEASURES = (
    Measure("loopback", "seconds of a round, 4 members, 16 MiB, loopback", "gloo's all-reduce", 1.5, at_most=True),
    Measure("equal", "seconds of a round, 4 members on 100 Mbit/s, 4 MiB", "gloo's all-reduce", 1.5, at_most=True),
    Measure("unequal", "the same, one on 25 Mbit/s", "gloo's all-reduce", 1.0, at_most=True),
)


def _read_p5(printed: Sequence[Any]) -> Values:
    values: Values = {}
    for measure, found in zip(P5_MEASURES, printed, strict=True):
        pairs = zip(found["seconds"]["ours"], found["seconds"]["gloo"], strict=True)
        values[measure.key] = [ours / gloo for ours, gloo in pairs]
    return values


SCHEDULER = "benchmarks.measured.scheduler --peers 64,1000 --stages 32 --steps 1 --output json"
P6 = [Run(SCHEDULER, "--repeats 1", "--repeats 5")]
P6_MEASURES = (
    Measure("brain/1000", "the brain alone, 1,000 peers, 32 stages", "", 2000, unit="hops/s", digits=0),
    Measure("sessions/1000", "the whole scheduler, 1,000 peers, 32 stages", "", 2000, unit="hops/s", digits=0),
    Measure("sessions/growth", "cost of a hop with 1,000 peers", "with 64", 1000 / 64, at_most=True),
)


def _read_p6(printed: Sequence[Any]) -> Values:
    (found,) = printed

    def speeds(level: str, peers: int) -> list[float]:
        return [row["hops_per_s"] for row in found if (row["level"], row["peers"]) == (level, peers)]

    few, many = speeds("sessions", 64), speeds("sessions", 1000)
    return {
        "brain/1000": list(speeds("brain", 1000)),
        "sessions/1000": list(many),
        "sessions/growth": [one / other for one, other in zip(few, many, strict=True)],
    }


# P8: hivemind ---------------------------------------------------------------------------------------------------------

P8_QUICK = {"compute": "--rounds 2 --steps 2", "overhead": "--rounds 3 --steps 6 --microbatch 2"}
P8 = [
    Run(f"benchmarks.baselines.hivemind_servers --output json {shape}", P8_QUICK[model], "--rounds 7 --steps 4")
    for model, shape in MODELS.items()
]
P8_MEASURES = tuple(
    measure
    for model, text in MODEL_TEXTS.items()
    for measure in (
        Measure(f"{model}/overlap", f"tokens/s with overlap, {text}", "hivemind's expert servers", 1.8),
        Measure(f"{model}/swarm", f"tokens/s without overlap, {text}", "hivemind's expert servers"),
    )
)


def _read_p8(printed: Sequence[Any]) -> Values:
    values: Values = {}
    for model, found in zip(MODEL_TEXTS, printed, strict=True):
        for speeds in map(_speeds, found["rounds"]):
            for way in ("overlap", "swarm"):
                values.setdefault(f"{model}/{way}", []).append(speeds[way] / speeds["hivemind"])
    return values


# M, S: memory, safety -------------------------------------------------------------------------------------------------

MEMORY = "benchmarks.measured.memory --output json"
M = [
    Run(f"{MEMORY} --microbatch 2 --runs 5", "--steps 2", "--steps 3"),
    Run(f"{MEMORY} --microbatch 8 --microbatches 6 --runs 3", "--steps 1", "--steps 3"),
]
M_TEXTS = {"parameters": ("parameters take as much as graphs", 1.55), "graphs": ("graphs take most", 1.3)}
M_MEASURES = tuple(
    Measure(key, f"memory at the peak, worse of two stages, {text}", "what the job's tensors take", aim, at_most=True)
    for key, (text, aim) in M_TEXTS.items()
)


def _read_m(printed: Sequence[Any]) -> Values:
    values: Values = {}
    for key, found in zip(M_TEXTS, printed, strict=True):
        values[key] = [max(server["training_ratio"] for server in taken) for taken in found["runs"]]
    return values


OVERHEAD = "benchmarks.measured.overhead --output json"
S = [
    Run(f"{OVERHEAD} --reproducible", "--rounds 7", "--rounds 21"),
    Run(OVERHEAD, "--rounds 7", "--rounds 21"),
]
S_TEXTS = {"reproducible": ("reproducible mode", "ordinary mode", 10.0), "safety": ("all of it", "without safety", 3.0)}
S_MEASURES = tuple(
    Measure(f"{key}/{figure}", f"{text} of a step, {mode}", against, aim, at_most=True, unit="%", digits=1)
    for key, (mode, against, aim) in S_TEXTS.items()
    for figure, text in (("time", "seconds"), ("processors", "processor time"))
)


def _read_s(printed: Sequence[Any]) -> Values:
    values: Values = {}
    for key, found in zip(S_TEXTS, printed, strict=True):
        values[f"{key}/time"] = [100.0 * turn["step"] for turn in found["rounds"]]
        values[f"{key}/processors"] = [100.0 * turn["processors"] for turn in found["rounds"]]
    return values


# C: codecs of averaging -----------------------------------------------------------------------------------------------

C = [
    Run(
        "benchmarks.learning.averaging_codecs --link 20:20 --output json",
        "--steps 60 --seeds 1",
        "--steps 240 --seeds 3",
    )
]
C_MEASURES = (
    Measure("bfloat16/time", "seconds of a step, bfloat16, 2 replicas through 20 Mbit/s, 20 ms", "none", at_most=True),
    Measure("int8/time", "seconds of a step, int8", "none", at_most=True),
    Measure("bfloat16/loss", "loss at equal tokens, bfloat16", "none", unit="%", at_most=True),
    Measure("int8/loss", "loss at equal tokens, int8", "none", unit="%", at_most=True),
)


def _read_c(printed: Sequence[Any]) -> Values:
    codecs = printed[0]["codecs"]
    values: Values = {}
    for codec in ("bfloat16", "int8"):
        pairs = list(zip(codecs[codec], codecs["none"], strict=True))
        values[f"{codec}/time"] = [one / none for (one, _), (none, _) in pairs]
        values[f"{codec}/loss"] = [100.0 * (one / none - 1.0) for (_, one), (_, none) in pairs]
    return values


# G: published figures ------------------------------------------------------------------------------------------------

PAPERS = {
    "dtfm": ("--random", "DT-FM's assignments of 64 GPUs"),
    "dedloc": ("--progress", "DeDLOC's shares and batches"),
    "varuna": ("", "Varuna's schedules and times"),
    "moshpit": ("", "Moshpit's errors"),
    "square_cube": ("", "SWARM's square-cube law"),
}
FLOW = Run("benchmarks.models.flow --output json", "--seconds 300 --seeds 1", "--seconds 600 --seeds 2")
G = [*(Run(f"benchmarks.models.{name} --output json {flags}".strip()) for name, (flags, _) in PAPERS.items()), FLOW]
FLOWS = [(in_flight, deaths) for in_flight in flow.IN_FLIGHT for deaths in flow.DEATHS]
G_MEASURES = (
    *(Measure(name, f"{text}: figures that come out", "those published", 1.0) for name, (_, text) in PAPERS.items()),
    *(
        Measure(f"flow/{many}/{deaths}", f"microbatches/s, {many} in flight, deaths {deaths:.0%}/h", "a flow", 0.95)
        for many, deaths in FLOWS
    ),
)


def _read_g(printed: Sequence[Any]) -> Values:
    *papers, routed = printed
    values: Values = {
        name: [sum(figure["comes_out"] for figure in found) / len(found)]
        for name, found in zip(PAPERS, papers, strict=True)
    }
    ours = [figure["found"] for figure in routed if "least_completion" in figure["about"]]
    for (many, deaths), share in zip(FLOWS, ours, strict=True):
        values[f"flow/{many}/{deaths}"] = [share]
    return values


ROWS = (
    Row("L1", "seconds to a loss", (LOSSES, TIMES, LINK_LOSS), _l1_measures(), _read_l1, network=True),
    Row(
        "L2",
        "loss at equal tokens",
        (LOSSES, TIMES),
        (Measure("loss", "loss with the defaults, at equal tokens", "synchronous AdamW", 1.0, at_most=True, unit="%"),),
        _read_l2,
    ),
    Row(
        "P1",
        "tokens per second on loopback",
        P1,
        _p1_measures(MODEL_TEXTS, "local"),
        partial(_read_p1, MODEL_TEXTS, ["local"]),
    ),
    Row("P1M", "the same, modelled compute", P1M, _p1_measures(P1M_TEXTS), partial(_read_p1, P1M_TEXTS, [])),
    Row("P1M4", "the same, 4 stages", P1M4, P1M4_MEASURES, _read_p1m4),
    Row("P2", "unequal replicas", P2, P2_MEASURES, _read_p2, network=True),
    Row(
        "P3",
        "tokens per second over slow links",
        P3["compute"],
        _p3_measures(LINKS),
        partial(_read_p3, LINKS),
        network=True,
    ),
    Row(
        "P3S",
        "the same, a small model",
        P3["overhead"],
        _p3_measures(LINKS, ", overhead shows"),
        partial(_read_p3, LINKS),
        network=True,
    ),
    Row(
        "P3M",
        "the same, modelled compute",
        P3M,
        _p3_measures(P3M_LINKS, ", modelled compute"),
        partial(_read_p3, P3M_LINKS),
        network=True,
    ),
    Row("P4", "the data plane", P4, P4_MEASURES, _read_p4),
    Row("P5", "an averaging round", P5, P5_MEASURES, _read_p5, network=True),
    Row("P6", "hops per second of one scheduler on one core", P6, P6_MEASURES, _read_p6),
    Row("P7", "deaths, a slow replica, a joiner", P7, P7_MEASURES, _read_p7),
    Row("P8", "hivemind", P8, P8_MEASURES, _read_p8),
    Row("M", "memory of stage servers", M, M_MEASURES, _read_m),
    Row("S", "what reproducible mode and safety cost", S, S_MEASURES, _read_s),
    Row("C", "codecs of averaging", C, C_MEASURES, _read_c, network=True),
    Row("G", "published figures", G, G_MEASURES, _read_g),
)
