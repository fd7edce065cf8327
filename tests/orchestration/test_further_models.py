"""Models of `evaluate.against` where people look: the report, MLflow's names, Prefect's artifacts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from ebft_core.bootstrap import PairedEstimate
from ebft_core.evaluation import Evaluation, Reference
from ebft_core.manifests import commit_folder
from orchestration.builders import planned_run
from tasks.journal_sync import evaluation_values
from tasks.report import against_rows, build_report
from tasks.stage_task import artifact_key


def estimate(base: float, tuned: float) -> PairedEstimate:
    difference = tuned - base
    around = (difference - 0.01, difference + 0.01)
    return PairedEstimate(base, tuned, difference, 0.005, around, (base, base), (tuned, tuned), 9)


def evaluation() -> Evaluation:
    undetermined = PairedEstimate(*[math.nan] * 4, *[(math.nan, math.nan)] * 3, 0)
    champion = Reference("models/old", {"ce": estimate(1.0, 1.5), "cfm": undetermined})
    return Evaluation(
        *("base", "tuned", 4, 9, 100, 20, 0, 0, 4, 1, 0.95, 50),
        metrics={"ce": estimate(2.0, 1.5), "cfm": undetermined},
        against={"champion": champion},
    )


def test_the_report_has_a_table_for_each_model(tmp_path: Path) -> None:
    plan = planned_run(tmp_path)
    made = tmp_path / "made"
    made.mkdir()
    (made / "evaluation.json").write_text(json.dumps(evaluation().to_json()), encoding="utf-8")
    (made / "rollouts.json").write_text('{"rollouts": []}', encoding="utf-8")
    commit_folder(made, plan.stage("evaluate").output, schema="ebft.evaluate/1", meta={})
    page = build_report(plan.run_dir)
    heading = page.index("Tuned model against champion")
    assert "▼ better" in page[:heading]
    table = page[heading : page.index("</table>", heading)]
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", table)
    assert cells[1] == "champion"
    assert cells[6:] == [
        "cross-entropy (nats per token)",
        "1.0000",
        "1.5000",
        "+0.5000 ± 0.0050",
        "[+0.4900, +0.5100]",
        "▲ worse",
    ]


def test_mlflow_gets_what_is_determined() -> None:
    assert evaluation_values(evaluation()) == {
        "base/ce": 2.0,
        "tuned/ce": 1.5,
        "delta/ce": -0.5,
        "eval/against/champion/ce_difference": 0.5,
    }


def test_prefect_takes_the_names() -> None:
    assert list(against_rows(evaluation())) == ["champion"]
    assert re.fullmatch("[a-z0-9-]+", artifact_key("evaluate-against-Old_Model.v1"))
