"""A stage program with a fake stage: `python fake_program.py STAGE RUN_DIR BEHAVIOUR`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["EBFT_FAKE_BEHAVIOUR"] = sys.argv[3]

from ebft_core.stage_runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), modules={sys.argv[1]: "orchestration.fake_stages"}))
