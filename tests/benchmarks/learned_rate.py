"""The constant rate that a learned rule's updates come nearest to, along a free run on the ResNet-34 of width 16.

At each step −(u·g) / (g·g), the rate at which SGD's update is nearest to the rule's u, and the cosine of u and −g, as
means over every 50 steps and over all. L2LOPT_DATA holds cifar10/.

python tests/benchmarks/learned_rate.py runs/reference/fig3-width16/lstm.safetensors [--steps 300]
"""

import argparse
from statistics import fmean

import torch

import l2lopt
from l2lopt import kernels
from l2lopt.core.seeding import seed_of
from l2lopt.core.types import stack
from l2lopt.optimisee import flat_loss, init_rows
from optimisees import resnet

EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", help="file of weights")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task, seed = resnet(width=16, batch_size=32, channels_last=True), seed_of("learned rate", 0)
    layout, params, aux = init_rows(task, [seed])
    rule, loss = kernels.fuse(l2lopt.load(options.rule)), flat_loss(task, layout)
    state = rule.init(layout, (1,), like=params, total_steps=options.steps)
    rates, cosines = [], []
    print("| steps | rate | cosine |\n|---|--:|--:|")
    for step in range(options.steps):
        params.requires_grad_()
        values, aux = loss(params, aux, stack([task.batch("train", seed, step)]))
        (grads,) = torch.autograd.grad(values.sum(), params)
        params, aux = params.detach(), {name: value.detach() for name, value in aux.items()}
        updates, state = rule.update_(grads, state, params, loss=values.detach())
        u, g = updates.double(), grads.double()
        rates.append(float(-(u * g).sum() / g.square().sum()))
        cosines.append(float(-(u * g).sum() / (u.norm() * g.norm())))
        params = params + updates
        if len(rates) % EVERY == 0:
            first = len(rates) - EVERY
            print(
                f"| {first + 1}–{len(rates)} | {fmean(rates[first:]):.3f} | {fmean(cosines[first:]):.2f} |", flush=True
            )
    print(f"| all | {fmean(rates):.3f} | {fmean(cosines):.2f} |")


if __name__ == "__main__":
    main()
