"""The report of the newest releases."""

from tests.supply_chain.newest import constraints, failures, report

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_good"/>
<testcase classname="tests.test_a" name="test_bad"><failure message="a&#10;  of 3"/></testcase>
<testcase classname="" name="tests.test_b"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def test_the_report_names_what_is_newer_and_what_failed() -> None:
    ours = constraints("# pins\nPyYAML==6.0.3\ntorch==2.13.0\nabsl-py==2.5.1\n")
    newest = {"pyyaml": "6.0.3", "torch": "2.14.1+cpu", "absl-py": "2.5.1", "extra": "1.0"}
    failed = failures(JUNIT)
    assert failed == [("tests.test_a.test_bad", "  of 3"), (".tests.test_b", "collection failure")]
    page = report(ours, newest, failed, True)
    assert "| torch | 2.13.0 | 2.14.1+cpu |" in page and "| extra | none | 1.0 |" in page
    assert "pyyaml" not in page and "absl-py" not in page
    assert "failed: 2" in page and "`tests.test_a.test_bad`:   of 3" in page


def test_a_report_without_tests_says_so() -> None:
    assert "none ran" in report({}, {}, [], False)
