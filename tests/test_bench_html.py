"""The page of a bench: complete, escaped, and made of nothing but itself."""

from xml.etree import ElementTree

from medusa.inference.bench import Answer, Bench, Measurement
from medusa.inference.bench_html import html_report
from medusa.inference.bench_summary import summarise
from medusa.inference.questions import Question


def page_of(name: str, accepted: list[int], failures: dict[str, str]) -> str:
    question = Question("1", "maths", ("one",))
    plain = Measurement("generate", question, 0, 0, Answer([1, 2, 3], [1.0, 2.0, 3.0]))
    other = Measurement(name, question, 0, 0, Answer([1, 2, 3], [0.5, 1.5, 1.5], 1, accepted))
    bench = Bench([plain, other], failures)
    return html_report(bench, summarise(bench), {"dtype": "float32"})


def test_one_prompt_and_a_method_that_failed() -> None:
    page = page_of("heads", [1], {"bad": "RuntimeError: <out> of luck"})
    ElementTree.fromstring(page.split("<body>")[1].join(["<body>", ""]).replace("</html>", ""))
    assert "&lt;out&gt; of luck" in page
    assert "2.00 (2.00-2.00)" in page
    assert 'width="340.0"' in page  # the largest ratio, 2, fills the scale
    assert 'x1="378.0"' in page  # and the baseline stands in its middle
    assert "depth 1" in page
    assert "float32" in page
    assert "<script" not in page
    assert "http" not in page


def test_long_names_and_no_acceptance() -> None:
    name = "x" * 300
    page = page_of(name, [], {})
    assert name in page
    assert "depth 1" not in page
    assert "Broke off" not in page
