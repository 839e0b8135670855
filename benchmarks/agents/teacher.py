"""The starter's teacher, but it gives up at once where it gives up, so that the greedy policy that imitates it gives up
and RL has something to find out."""

from functools import partial

from ray_jobs.starter import warehouse

teach = partial(warehouse.teach, num_calls=(0, 0, 0, 0, 2))
