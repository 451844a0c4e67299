"""One rank of a `Trainer` under DistributedDataParallel, started by torchrun: train, and check the zeros."""

import sys

from sparse_llama import holds, sparse_llama, trainer, zeros

model = sparse_llama()
masks = zeros(model)
run = trainer(model, sys.argv[1], ddp_backend="gloo", gradient_accumulation_steps=2)
run.train()
assert run.args.world_size == 2
assert holds(model, masks)
