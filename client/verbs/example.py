"""The job file that `swarm submit --example` prints: every key, explained, ready to run."""

from __future__ import annotations

import json
import sysconfig
from typing import get_args

from swarm.job.optimizers import OptimizerName
from swarm.text import either

_EXAMPLE = """\
# A job for swarm. Start a small swarm on this machine with `swarm up`, then `swarm submit job.toml`.
# Every key is here; those marked "required" have no default, the others may be left out.
# Sizes are bytes or "64MiB", times are seconds (_s).

schema_version = 1
name = "example"                # required: a-z, 0-9 and -, at most 40 characters

[model]
id        = ""                  # Hugging Face hub id or local folder to start from; empty = from scratch, by config
revision  = "main"              # of a hub id; pinned to a commit at submit
init      = "random"            # default pretrained: the weights of id; random: drawn from training.seed
family    = "llama"             # default auto: what id says, else llama; mistral, qwen2, qwen3, gemma2, gpt2, gpt_neox
config    = {config}
                                # required without id: fields of the family's Hugging Face config; beside id only
                                # dropout, such as {{ attention_dropout = 0.1 }}
dtype     = "float32"           # default bfloat16: float32, bfloat16 (autocast), or bfloat16_parameters (copies of the
                                # weights, all layers in bfloat16); the optimizer's weights stay float32
recompute = "auto"              # true: keep a stage's input only, compute its forward again in backward: less memory;
                                # auto: if the memory on offer asks for it
compile   = false               # torch.compile of the layers, while a stage loads; not with training.reproducible
tokenizer = "byte"              # UTF-8 bytes, no files; or a folder with tokenizer.json, a hub id, "" (that of id)

[model.narrow]
kind   = "none"                 # or maxout, bottleneck, anchor: what stands between two layers where the model itself
                                # is narrow, for links so slow that stages wait for them; it learns less from each token
factor = 4                      # 2 to 64, a divisor of the width: so much less crosses a cut there
every  = "auto"                 # or the layers from one place to the next, a divisor of their number; stages end only
                                # there; auto: as in the weights that it starts from, else as few places as stages need
rank   = 0                      # anchor: of its table by token, one for each place; 0: vocabulary x width

[data]
source   = {source}
                                # required: your text files, such as "corpus/**/*.txt"; here Python's own library
format   = "auto"               # by suffix, or text (a file is a document), jsonl, parquet, bin (token ids), hf
text_field = "text"             # jsonl, parquet, hf: where the text is; "doc.text" is a field of a field
on_null  = "fail"               # jsonl, parquet, hf: what becomes of a row without a text (null); or skip
subset   = ""                   # hf ("hf:owner/name", or a folder): the data set's configuration
split    = "train"              # hf
bin_dtype = "uint16"            # bin: uint16 or uint32, little-endian
sequence_length = 128           # default 1024; tokens, 8 to 1048576
packing  = true                 # documents follow one another; false: each begins a sequence, the rest is padding
shuffle  = true                 # the order depends on training.seed and the step alone
validation_ratio = 0.0          # 0 to 0.5: this share, the end of the data, is not trained on
upload_shard_bytes = "64MiB"    # 1MiB to 1GiB: the unit of upload

[training]
steps = 200                     # default 1000: optimizer steps
global_batch_sequences = 32     # default 256: sequences per step
microbatch_sequences   = "auto" # or a divisor of the global batch
optimizer     = "adamw"         # {optimizers}
learning_rate = 1e-3            # default 3e-4
betas         = [0.9, 0.95]
eps           = 1e-8            # betas and eps: all but sgd
lookahead     = 0.3             # adamw: the share of the fresh gradient in its numerator; 0 = torch's AdamW
momentum      = 0.0             # sgd only, below 1
optimizer_on  = "auto"          # device | host: its state is in the memory beside a GPU's, and steps take longer;
                                # auto: host if the memory on offer asks for it
weight_decay  = 0.1             # sgd adds it to the gradient; the others shrink the weights by it: all of them, also
                                # norms, biases and embeddings, which many trainers leave out
schedule      = "cosine"        # constant, linear or cosine
warmup_steps  = 5               # default 100, or steps if that is less
min_lr_ratio  = 0.1             # the schedule ends at this share of learning_rate
grad_clip_norm = 1.0            # global norm; 0 = off
seed          = 0
eval_every_steps = 0            # evaluate the held-out data so often and after the last step (0 = never); needs
                                # data.validation_ratio
reproducible  = false           # fixed-point gradient sums: the same bits as one process, whatever the swarm does
fixed_point_bits = 30           # 16 to 40: the grid of those sums

[pipeline]
stages      = "auto"            # or a number, at most one per decoder layer
split       = "auto"            # or layers per stage, such as [2, 2]
routing     = "least_completion" # or iwrr (shares by measured speed), uniform (at random)
max_in_flight = "auto"          # or 1 to 4096 microbatches
compression = "bfloat16"        # none, bfloat16, float16 or int8: what travels between stages; auto: by link speed
overlap     = "auto"            # microbatches of a step that use weights one step old, which keeps the pipeline
                                # busy between steps: 0 = none, a share as 0.25, "all", or what stages, replicas
                                # and measured links ask for
sync_steps  = "auto"            # the first steps do without overlap; auto: warmup_steps
rebalance   = true              # move stage servers to the stage that limits the job
recut       = "auto"            # stall: a job that waits for stage servers, and could begin with the present ones if it
                                # were cut otherwise, does so after limits.no_progress_s; off: it waits; auto: stall if
                                # stages and split are auto and there are no islands

[islands]
count       = "auto"            # or 1 to 64 complete pipelines, joined by averaging.mode; in a swarm 8 at most;
                                # auto: one for each site (swarm stage-server --site) that can hold the model alone;
                                # else 1, or 2 with gaia
min         = 1                 # to count: with fewer islands at work the job stalls; until then it goes on without
shares      = "auto"            # equal, or speed: slow islands train less of each step, so that none waits long for
                                # them; auto: speed, but equal with training.reproducible

[averaging]
mode        = "allreduce"       # or diloco, streaming, gaia: islands exchange as [outer] says
aggregate   = "mean"            # or centered_clip: gradients of replicas that stray too far are clipped; it needs
                                # limits.min_replicas = 4 and does without training.reproducible
compression = "none"            # of gradients between the replicas of a stage: none, bfloat16 or int8; what rounding
                                # leaves out is added to the next step's
timeout_s = 60.0                # 1 to 3600: one averaging round; in a swarm with islands less than limits.no_progress_s

[outer]
every_steps   = "auto"          # 1 to 1000000 inner steps between two exchanges; auto: 50, streaming 100, gaia 2
learning_rate = "auto"          # up to 10, of the outer step; auto: 1.0, streaming 0.7, gaia 1.0
momentum      = "auto"          # of the outer step (Nesterov), below 1; auto: 0.5, gaia 0. If only one of the two is
                                # "auto", it is the papers' own: 0.7, streaming 0.4, with a momentum of 0.9
fragments     = "auto"          # parts of the model, exchanged in turn; auto: 1, streaming one for every three layers,
                                # if they can all be exchanged one after the other
overlap_steps = "auto"          # inner steps while a part is exchanged; auto: as many as that takes, a tenth of
                                # every_steps at most; 0, streaming 1, where no link was measured, and where
                                # training.reproducible or checkpoint.resume_from is set; gaia 1
mixing        = "auto"          # the share of its own weights that an island keeps, below 1; auto: 0.5, but 0 where
                                # overlap_steps is 0, except with streaming, and with gaia
compression   = "auto"          # none, bfloat16, int8, fp4: what islands send; auto: bfloat16, streaming fp4, gaia none
threshold     = "auto"          # gaia: 0 to 1; islands send a number once they differ by this share of it, divided by
                                # the root of the number of steps; auto: 0.01
patience      = "auto"          # 0 to 1: for how much of a period an exchange waits for an island that has not come,
                                # which then goes into the next one with all that it trained; or none: for ever;
                                # auto: 0.05, a step and a half at least; none where shares are equal

[checkpoint]
dir          = ""               # an absolute folder or URL (s3://, gs://) that the scheduler can write; empty = its own
every_steps  = 500              # 0 = not by steps
every_s      = 1800.0           # 0 = not by time; whichever comes first; the first time after 3 minutes
keep_last    = 3                # 2 to 1000
keep_every_steps = 0            # multiples of it are kept for ever; 0 = none
optimizer    = true             # false: weights only, a third of the size, but no exact resume
resume_from  = ""               # start from a checkpoint: a folder, or "JOB:STEP"

[limits]
priority      = 0               # -100 to 100: jobs with a higher one get idle stage servers first; none is taken away
min_replicas  = 1               # stage servers per stage before the job starts
max_replicas  = 0               # stage servers per stage that the job takes at most, as a mean of its stages; 0 = all
no_progress_s = 300.0           # 10 to 86400: no step committed for so long: as on_stall
max_runtime_s = 0.0             # 0 = no limit; then it is paused, with all saved
on_stall      = "wait"          # wait, pause or fail, where it cannot go on, such as without a stage; wait: for peers
on_nonfinite  = "skip"          # skip, pause or fail: a step with NaN or infinite gradients
nonfinite_steps_max = 10        # with "skip": the job fails after this number of such steps in a row, or if all were

[trust]
spot_check = 0.0                # the share of hops that another stage server computes again to compare: 0 = all are
                                # believed, 0.02 on machines of others; needs training.reproducible
recount = 0.0                   # the share of steps of which another computes the sum of one once more; others': 0.02
second_owner = 0.0              # the share of rounds of which another reduces a slice once more; others' machines: 0.1
second_hash = false             # true: others hash what one of them saves; a save whose hashes differ is not accepted
"""

_CONFIG = (
    "{ hidden_size = 128, intermediate_size = 384, num_hidden_layers = 4, num_attention_heads = 4, "
    "tie_word_embeddings = true }"
)


def example_job() -> str:
    """A complete, commented job file that runs as it is: it trains on the files of Python's standard library."""
    return commented_job(f"{sysconfig.get_paths()['stdlib']}/[a-d]*.py")


def commented_job(source: str) -> str:
    """The same with another `data.source`."""
    words = either(get_args(OptimizerName))
    return _EXAMPLE.format(config=_CONFIG, source=json.dumps(source, ensure_ascii=False), optimizers=words)
