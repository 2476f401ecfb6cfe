"""Trains a small model through a swarm from Python.

Start a swarm with `swarm up`, then run this file, or open it cell by cell in a notebook (Jupyter and editors know the
`# %%` marks). SWARM_SCHEDULER names a scheduler elsewhere.
"""

# %% Connect. The certificate is the one that `swarm up` or `swarm login` left in your profile.
import sysconfig

import swarm

client = swarm.Client()
for peer in client.peers():
    print(peer.id, peer.device, f"{peer.memory_bytes / 2**30:.1f} GiB", peer.state)

# %% Describe a job. These are the keys of a job file; `swarm submit --example` explains all of them.
description = {
    "name": "from-python",
    "model": {
        "family": "llama",
        "dtype": "float32",
        "tokenizer": "byte",
        "config": {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.05,
        },
    },
    "data": {"source": f"{sysconfig.get_paths()['stdlib']}/[a-c]*.py", "sequence_length": 64},
    "training": {"steps": 40, "global_batch_sequences": 8, "learning_rate": 3e-3, "warmup_steps": 5},
}
job = client.submit(description, changes={"training.seed": 7})
print(job.id, job.reason)

# %% Follow it. Each value is the whole job at that moment.
for now in client.watch(job):
    print(now.state, f"{now.step}/{now.steps}", f"loss {now.loss:.3f}" if now.step else now.reason)

# %% Which loss did each step have?
losses = {step.step: step.loss for step in client.history(job)}
print(f"loss {losses[1]:.3f} after the first step, {losses[job.steps]:.3f} after the last")

# %% Fetch the model: a folder for transformers.AutoModelForCausalLM.from_pretrained.
model = client.pull(job, "from-python-model", force=True)
print(model.path, model.weights_sha256)
client.close()
