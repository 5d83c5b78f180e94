from eagle3_ray.progress import Progress


def test_a_line_says_done_total_rate_and_time_left(capsys) -> None:
    progress = Progress("extract", 40, "units", done=10, every_s=0)
    progress.done = 20
    assert progress.line(100.0, "5 bad") == "extract: 20/40 units, 0.1 units/s, 3:20 left, 5 bad"  # 10 in this run
    progress.add(20)
    assert capsys.readouterr().out.startswith("extract: 40/40 units")


def test_lines_come_no_faster_than_asked_and_the_last_one_always(capsys) -> None:
    progress = Progress("train", 5, "steps", every_s=3600)
    for _ in range(5):
        progress.add(1)
    assert capsys.readouterr().out.count("\n") == 1
