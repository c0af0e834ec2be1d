"""The report's words and tables: they say what the statistics say, in every format."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from fabricated import ARMS, Planned, make_study
from rich.console import Console

from keyhole.core.errors import InputError
from keyhole.studies.report.html import to_fragment, to_html
from keyhole.studies.report.markdown import plain, to_markdown
from keyhole.studies.report.sentences import by_prefixes, headlines, reading, resume_command, state, warnings
from keyhole.studies.report.tables import Table, tables
from keyhole.studies.report.terminal import render
from keyhole.studies.report.wording import estimated, number, perplexity
from keyhole.studies.result import StudyResult, open_study
from keyhole.studies.statistics import Estimate


def by_key(result: StudyResult) -> dict[str, Table]:
    return {table.key: table for table in tables(result)}


def row(table: Table, arm: str) -> dict[str, object]:
    cells = next(cells for cells in table.rows if cells[0].text == arm)
    return {column.name: cell for column, cell in zip(table.columns, cells, strict=True)}


def printed(result: StudyResult, width: int, *, unicode: bool = True, styled: bool = False) -> str:
    screen = Console(width=width, record=True, highlight=False, force_terminal=styled, file=StringIO())
    for part in render(result, width, unicode=unicode, styled=styled):
        screen.print(part)
    return screen.export_text(styles=styled)


class Reader(HTMLParser):
    """What a page holds: its text, what is struck out, and every address it names."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.struck: list[str] = []
        self.wrong: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if "s" in self.open:
            self.struck.append(data)


def test_the_verdicts_are_the_statistics_own(result: StudyResult) -> None:
    table = by_key(result)["verdicts"]
    assert result.verdicts["rope"] == "better"
    assert result.verdicts["shuffle"] == "not distinguishable"
    for arm in result.arms:
        cells = row(table, arm.name)
        found = arm.estimate("dev_loss")
        if found is None:
            assert cells["dev loss"].text == "-"
            continue
        mean, half = cells["dev loss"].text.split(" ± ")
        assert float(mean) == pytest.approx(found.mean, abs=5e-5)
        assert float(half) == pytest.approx((found.high - found.low) / 2, abs=5e-5)
        difference = result.differences.get(arm.name)
        if difference is None or difference.low_holm is None:
            continue
        shown = [float(part) for part in re.findall(r"[-+]?\.\d+", cells["difference, nats"].text)]
        wanted = [difference.mean, difference.low_holm, difference.high_holm]
        assert shown == pytest.approx(wanted, abs=5e-5)
        assert cells["verdict"].text.startswith(difference.verdict)
        if difference.verdict == "not distinguishable" and difference.seeds_to_decide:
            assert f"about {difference.seeds_to_decide} seeds" in cells["verdict"].text


def test_arms_stand_in_the_plan_s_order_in_every_table(result: StudyResult) -> None:
    planned = [arm.name for arm in ARMS]
    losses = [arm.mean("dev_loss") for arm in result.arms if arm.done]
    assert losses != sorted(losses), "the plan's order is that of the losses: nothing would be shown"
    assert len(tables(result)) == 6
    for table in tables(result):
        assert [cells[0].text for cells in table.rows] == planned


def test_a_dishonest_arm_s_numbers_are_struck_out_and_its_prefix_loss_is_not(result: StudyResult) -> None:
    lowest = min((arm for arm in result.arms if arm.done), key=lambda arm: arm.mean("dev_loss"))
    assert lowest.name == "reweight"
    shown = by_key(result)
    cells = row(shown["verdicts"], "reweight")
    assert cells["dev loss"].struck
    assert cells["difference, nats"].struck
    assert cells["verdict"].text == "not comparable (suffix, truncation, prefix loss)"
    honest = [trial.values["prefix"]["prefix"] for trial in lowest.done]
    assert not cells["loss by prefixes"].struck
    assert float(cells["loss by prefixes"].text) == pytest.approx(sum(honest) / len(honest), abs=5e-5)
    for table in shown.values():
        for first, *others in table.rows:
            assert any(cell.struck for cell in others) == (first.text == "reweight" and table.key != "spent")


def test_every_format_strikes_the_dishonest_loss_and_never_calls_it_better(
    result: StudyResult, page: str, text: str
) -> None:
    loss = number(result.arm("reweight").mean("dev_loss"))
    line = next(line for line in text.splitlines() if line.startswith("| reweight"))
    assert f"~~{loss} ± " in line
    piped = printed(result, 160)
    assert f"~~{loss} ± " in piped
    assert f"~~{loss}~~" in printed(result, 80)
    assert "\x1b[2;9m" in printed(result, 160, styled=True)
    assert any(loss in struck for struck in Reader(page).struck)
    for shown in (text, piped, re.sub("<[^>]+>", " ", page)):
        assert not re.search(r"reweight\W+(?:\S+ ){0,6}better", shown)


def test_an_arm_that_reads_the_future_is_judged_by_its_prefixes(result: StudyResult) -> None:
    found = by_prefixes(result)
    assert set(found) == {"reweight"}
    assert found["reweight"].verdict == "worse"
    said = headlines(result)["reweight"]
    assert "reads the future (caught by suffix, truncation, prefix loss)" in said
    assert f"it is {found['reweight'].sentence}" in said


def test_with_a_dishonest_baseline_nothing_is_compared_and_it_is_said(tmp_path: Path) -> None:
    arms = [Planned("baseline", leak=0.3), Planned("rope", -0.1), Planned("plain")]
    found = open_study(make_study(tmp_path / "study", arms, search=False))
    assert set(found.verdicts.values()) == {"not comparable"}
    assert any("baseline itself reads the future" in warning for warning in warnings(found))
    table = by_key(found)["verdicts"]
    assert row(table, "baseline")["verdict"].text.startswith("baseline, not honest")
    assert not row(table, "rope")["dev loss"].struck
    assert "prefix by prefix" in headlines(found)["rope"].lower()


def test_a_diverged_seed_and_a_rate_at_the_edge_are_told(result: StudyResult, text: str, page: str) -> None:
    said = warnings(result)
    assert "sinusoidal, seed 3: diverged: the loss was nan at step 240" in said
    assert "the best rate is the first or last tried for shuffle: a better one may lie beyond" in said
    for shown in (text, page, printed(result, 120)):
        assert "diverged: the loss was nan at step 240" in shown
    assert row(by_key(result)["seeds"], "sinusoidal")["seed 3"].text == "diverged"
    assert row(by_key(result)["rates"], "shuffle")["best"].text == "0.3, at the edge"


def test_what_is_not_equal_is_told(result: StudyResult) -> None:
    table = by_key(result)["spent"]
    assert [column.name for column in table.columns if "(equal)" in column.name] == ["steps (equal)", "tokens (equal)"]
    assert row(table, "running")["parameters"].text == "832,825 (1.03x)"
    assert "every arm was given the same: 600 steps" in table.notes
    assert any(note.startswith("not equal - FLOPs of training") for note in table.notes)


def test_texts_and_lengths_are_means_over_seeds_and_reasons_are_given(result: StudyResult) -> None:
    shown = by_key(result)
    cells = next(cells for cells in shown["texts"].rows if cells[0].text == "reweight")
    for place, key in ((3, "loss"), (4, "prefix_loss")):
        scored = [trial.values["texts"]["long"][key] for trial in result.arm("reweight").done]
        assert cells[place].text == perplexity(sum(scored) / len(scored))
        assert cells[place].struck == (key == "loss")
    assert shown["texts"].notes[0].endswith('with this !" (12 tokens)')
    assert row(shown["past"], "baseline")["4 times (256)"].text == "-"
    assert any("none for 256" in note for note in shown["past"].notes)


def test_an_unfinished_study_is_told_as_far_as_it_has_come(result: StudyResult, text: str, page: str) -> None:
    assert state(result).startswith("30 of 35 trainings are done")
    assert "nothing is there yet of shift" in state(result)
    assert headlines(result)["shift"] == "undecided: not trained yet."
    for shown in (text.replace("\\", ""), page, printed(result, 200)):
        # A terminal breaks lines where it must, here in a folder with a long name.
        assert "30 of 35 trainings are done" in " ".join(shown.split())
        assert resume_command(result) in " ".join(shown.split())


def test_a_finished_study_says_nothing_of_that(tmp_path: Path) -> None:
    found = open_study(make_study(tmp_path / "study", ARMS[:3], search=False))
    assert found.complete
    assert state(found) == ""
    assert "Not finished" not in to_html(found)
    assert "rates" not in by_key(found)


def test_a_study_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    place = make_study(tmp_path / "study", ARMS[:3], search=False)
    for folder in ("runs", "audits"):
        shutil.rmtree(place / folder)
    found = open_study(place)
    assert "0 of 15 trainings are done" in to_markdown(found)
    assert "not audited yet" in to_html(found)
    assert list(by_key(found)) == ["verdicts"]


def test_an_arm_that_diverged_at_every_rate_is_not_waited_for(tmp_path: Path) -> None:
    lost = Planned("lost", missing=(0, 1, 2, 3, 4))
    place = make_study(tmp_path / "study", [ARMS[0], lost])
    for path in (place / "rates" / "lost").rglob("result.json"):
        path.write_text('{"state": "diverged"}')
    found = open_study(place)
    assert state(found) == ""
    assert "lost diverged at every learning rate that was tried, and was not trained" in warnings(found)


@pytest.mark.parametrize("lost", ["failed", "no number"])
def test_an_arm_does_not_win_by_the_seeds_that_it_survived(tmp_path: Path, lost: str) -> None:
    out = make_study(tmp_path / "s", [Planned("baseline"), Planned("rope", -0.3)], search=False)
    assert open_study(out).verdicts["rope"] == "better"
    place = out / "runs/rope/seed-2/result.json"
    if lost == "failed":
        place.unlink()
        (out / "failures.json").write_text(json.dumps({"runs/rope/seed-2": "a matrix was singular"}))
    else:
        place.write_text(json.dumps({**json.loads(place.read_text()), "dev_loss": math.inf}))
    rope = open_study(out).differences["rope"]
    assert rope.verdict == "undecided"
    assert "no finite difference at 1 seed (2)" in rope.sentence


def test_what_changed_on_the_way_is_told(tmp_path: Path) -> None:
    out = make_study(tmp_path / "s", [Planned("baseline"), Planned("rope")])
    assert not any("different versions" in said or "seeds were added" in said for said in warnings(open_study(out)))
    place = out / "runs/rope/seed-1/environment.json"
    place.write_text(place.read_text().replace("2.13.0", "2.14.0"))
    known = json.loads((out / "study.json").read_text())
    (out / "study.json").write_text(json.dumps({**known, "seeds_before": [[0, 1, 2]]}))
    (out / "failures.json").write_text(json.dumps({"rates/rope/rate-0.1-seed-10000": "no memory"}))
    said = " ".join(warnings(open_study(out)))
    assert "trials were made with different versions" in said
    assert "seeds were added when results were there (3, then 5)" in said
    assert "rates/rope/rate-0.1-seed-10000 failed: the rate was chosen from the others" in said


def test_gains_and_losses_of_reading_ahead_do_not_cancel(tmp_path: Path) -> None:
    out = make_study(tmp_path / "s", [Planned("baseline"), Planned("rope")], search=False)
    place = out / "runs/rope/seed-1/result.json"
    values = json.loads(place.read_text())
    values["prefix"] |= {"gap": 0.0, "worst": 0.2}
    place.write_text(json.dumps(values))
    assert open_study(out).verdicts["rope"] == "not comparable"


def test_only_what_reads_later_tokens_is_said_to_read_the_future(tmp_path: Path) -> None:
    out = make_study(tmp_path / "s", [Planned("baseline"), Planned("rope")], search=False, measured=False)
    place = out / "audits/rope.json"
    found = json.loads(place.read_text())
    next(one for one in found["findings"] if one["name"] == "padding")["verdict"] = "fails"
    place.write_text(json.dumps(found))
    assert headlines(open_study(out))["rope"].startswith("not comparable: it fails honesty (caught by padding)")


def test_trainings_that_failed_alike_are_told_together(tmp_path: Path) -> None:
    place = make_study(tmp_path / "study", [ARMS[0], Planned("gone", missing=(0, 1, 2, 3, 4))], search=False)
    failures = {f"runs/gone/seed-{seed}": "the disk is full" for seed in range(5)}
    (place / "failures.json").write_text(json.dumps(failures))
    found = open_study(place)
    assert warnings(found) == ["gone, seeds 0, 1, 2, 3, 4: failed: the disk is full"]
    assert headlines(found) == {"gone": "undecided: its trainings failed."}
    assert "5 failed" in state(found)


def test_one_seed_decides_nothing_and_it_is_said(tmp_path: Path) -> None:
    found = open_study(make_study(tmp_path / "study", ARMS[:2], seeds=1, search=False, measured=False))
    assert headlines(found) == {"rope": "undecided: one seed."}
    assert "undecided: one seed" in to_markdown(found)


def test_names_notes_and_texts_are_text_and_nothing_else(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> | **bold** [x](http://evil.example) `code`\n# head"
    place = make_study(tmp_path / "study", [ARMS[0], Planned("rope", note=evil)], search=False)
    found = open_study(place)
    path = place / "runs" / "rope" / "seed-1" / "result.json"
    path.write_text(json.dumps({"state": "diverged", "message": "<img src=x onerror=alert(1)>"}))
    path = place / "audits" / "rope.json"
    finding = json.loads(path.read_text())["findings"][0]
    finding |= dict.fromkeys(("name", "statement", "expected", "measured", "why", "remedy"), evil)
    finding["code"] = f"````\n{evil}\n```"
    path.write_text(json.dumps({"findings": [finding | {"verdict": "fails"}]}))
    found = open_study(place)
    for shown in (to_html(found), to_fragment(found)):
        assert "<script" not in shown
        assert "<img" not in shown
        assert "&lt;script&gt;" in shown
        assert "&lt;img src=x" in shown
        assert "caught by &lt;script&gt;" in shown
    text, code = re.subn(r"    `````python\n(    .*\n)+?    `````\n", "", to_markdown(found))
    assert code == 1
    assert "<script" not in text
    assert "\n# head" not in text
    assert r"\[x\]" in text
    line = next(line for line in text.splitlines() if line.startswith("| rope"))
    assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", text.split("| rope")[0].splitlines()[-2]))


def test_the_page_asks_nothing_of_any_other_place(page: str) -> None:
    addresses = set(re.findall(r"https?://[^\"'\s<>)]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in page
    for tag, attributes in Reader(page).tags:
        assert tag not in ("script", "link", "iframe", "img")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")


def test_the_page_is_well_formed_and_readable_without_eyes(page: str) -> None:
    read = Reader(page)
    assert read.wrong == []
    assert read.open == []
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 12
    pictures = [attributes for tag, attributes in read.tags if tag == "svg"]
    assert len(pictures) == 6
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)
    assert all("scope" in attributes for tag, attributes in read.tags if tag == "th")
    assert "struck out: " in read.struck


def test_the_page_has_all_sections_and_the_command_that_repeats_the_study(result: StudyResult, page: str) -> None:
    heads = re.findall(r"<h2>([^<]+)</h2>", page)
    assert heads[:3] == ["In words", "Verdicts", "Charts"]
    for head in ("Audits", "Perplexity on texts", "Learning rates searched", "How to read this", "To repeat it"):
        assert head in heads
    assert result.command in page
    assert "torch 2.13.0" in page
    assert "bfloat16" in page
    assert "use the running norm" in page
    assert "cumsum(-1)" in page
    assert len(reading(result)) == 5


def test_no_line_in_the_terminal_is_wider_than_it_and_no_number_is_cut(result: StudyResult) -> None:
    for width in (80, 120, 160):
        shown = printed(result, width)
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
        assert "-.0719 to -.0538" in shown


def test_a_terminal_without_unicode_is_given_ascii(result: StudyResult) -> None:
    shown = printed(result, 100, unicode=False)
    assert shown.isascii()
    assert "?" not in shown
    assert "1.5030 +- .0113" in shown


def test_numbers_are_written_for_people() -> None:
    assert [number(value) for value in (1.23456, -0.5, 0.0, None, 12345.6, float("inf"))] == [
        "1.2346",
        "-.5000",
        ".0000",
        "-",
        "12,345.6000",
        "infinite",
    ]
    assert number(-0.00001, 2, "+") == ".00"
    assert perplexity(800.0) == "infinite"
    lopsided = Estimate(mean=1.0, low=0.9, high=1.3, sd=0.1, n=20, method="bootstrap")
    assert estimated(lopsided) == "1.0000 (.9000 to 1.3000)"
    assert estimated(Estimate(mean=1.0, low=None, high=None, sd=None, n=1, method="none")) == "1.0000"
    assert plain("a_b <c>|") == r"a\_b &lt;c&gt;\|"


def test_a_file_for_the_report_cannot_be_a_folder(result: StudyResult, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; give the name of a file"):
        result.report(html=tmp_path)
