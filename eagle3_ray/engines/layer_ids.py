"""`python -m eagle3_ray.engines.layer_ids FOLDER BOUNDARY…`: prints the target's SGLang layer ids for boundaries."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle3_ray.capture import sglang_layer_ids

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("boundaries", type=int, nargs="+")
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args()
    print(*sglang_layer_ids(given.folder, tuple(given.boundaries), given.trust_remote_code))
