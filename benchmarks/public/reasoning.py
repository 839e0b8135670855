"""Two families of reasoning-gym, small enough for a model of 135 million parameters."""

from envs.datasets.reasoning_gym import ReasoningGym

_NEEDLES = ReasoningGym("needle_haystack", num_tasks=3000, seed=1, min_num_statements=4, max_num_statements=8)
_SORTING = ReasoningGym("word_sorting", num_tasks=3000, seed=1, min_words=2, max_words=3, max_word_length=6)

needle_tasks, needle_score = _NEEDLES.tasks, _NEEDLES.score
sorting_tasks, sorting_score = _SORTING.tasks, _SORTING.score
