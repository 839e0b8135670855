import sys
from pathlib import Path

# Scripted doubles live beside the tests that use them.
for room in ("rollout", "learner", "actors"):
    sys.path.insert(0, str(Path(__file__).parent / room))
