"""Settings and what every other package may import."""

PACKAGES = ("configs", "envs", "rollout", "learner", "reward", "actors", "ray_jobs")
"""The top-level packages of this project, lowest layer first."""
