"""The starter's teacher, which gives up at once in four of five tasks, so that RL has something to improve."""

from functools import partial

from ray_jobs.starter import warehouse

teach = partial(warehouse.teach, num_calls=(0, 0, 0, 0, 2))
