"""Two families of reasoning-gym, small enough for a model of 135 million parameters."""

from envs.datasets.reasoning_gym import ReasoningGym

_SPELLING = ReasoningGym("spell_backward", num_tasks=3000, seed=1, min_word_len=3, max_word_len=4)
_SORTING = ReasoningGym("word_sorting", num_tasks=3000, seed=1, min_words=2, max_words=3, max_word_length=6)

spelling_tasks, spelling_score = _SPELLING.tasks, _SPELLING.score
sorting_tasks, sorting_score = _SORTING.tasks, _SORTING.score
