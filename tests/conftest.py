import sys
from pathlib import Path

# Scripted doubles live beside the tests that use them.
for room in ("envs", "rollout", "learner", "actors", "ray_jobs"):
    sys.path.insert(0, str(Path(__file__).parent / room))
