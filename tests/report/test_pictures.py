"""Pictures of the report are drawn in silence: a warning would spell what is in them."""

import warnings

from dpray.report.evaluation_pictures import topics_svg


def test_signs_that_the_font_lacks_are_not_spelled_on_stderr(capfd):
    topics = [{"terms": ["\u7cd6\u5c3f\u75c5"], "real": 0.5, "synthetic": 0.4}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        svg = topics_svg(topics)

    assert [str(warning.message) for warning in caught] == []
    assert capfd.readouterr().err == ""
    assert "\u7cd6\u5c3f\u75c5" in svg
