from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpray.io.public_files import FewShot
from dpray.io.template_file import About, packaged
from dpray.methods.private_prediction.prompts import PACKAGE, load_template
from dpray.types import InputError


def test_the_papers_templates_are_there() -> None:
    assert {
        "agnews", "trec", "dbpedia", "mit_g", "mit_d", "imdb", "yelp", "json", "wikimovies", "texts"
    } <= set(packaged(PACKAGE))  # fmt: skip


@pytest.mark.parametrize("name", packaged(PACKAGE))
def test_private_text_takes_the_place_of_the_placeholder(name: str) -> None:
    template = load_template(name)
    text = "{{ x }} {label} {text} {% if %} } <b>&amp; 7"
    private = template.private_prompt(text, "Sports")
    public = template.public_prompt("Sports")
    assert text in private.user and text not in public.user
    assert private.prefix == public.prefix
    assert text not in repr(private)


def test_agnews_is_figure_4() -> None:
    public = load_template("agnews").public_prompt("Business")
    assert public.user == (
        "Here are texts with News Type: Business.\n\nText: <text of News Type: Business>\n\n"
        "Please give me another one."
    )
    assert public.prefix == "Text:"


def test_film_records_are_figures_11_and_12() -> None:
    template = load_template("wikimovies")
    text = json.dumps({"title": "The Case", "cast": ["A", "B <C>"], "text": 'He said "no".'})
    private, public = template.private_prompt(text, ""), template.public_prompt("")
    assert private.user.startswith("Here is a JSON record:\n```\n{")
    assert public.user.startswith("Here is the schema for a JSON record:\nSchema:\n```\n{\n")
    assert json.loads(template.released('\n  "title": "x"\n}\n')) == {"title": "x"}


def test_a_users_own_template(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "user: '{{ Like {text}, of {label}:'\nplaceholder: a {label}\nstop: ['.']\n"
        "output: '({completion})'\nlabels: {1: sports}\n"
    )
    template = load_template(str(path))
    assert template.private_prompt("x", "l").user == "{ Like x, of l:"
    assert template.public_prompt("1").user == "{ Like a sports, of sports:"
    assert template.template.stop == (".",)
    assert template.released(" {x} ") == "( {x} )"


def test_a_text_in_quotation_marks_is_released_without_them(tmp_path: Path) -> None:
    """Marks within a text stay, and those of a template that writes around its completion."""
    texts = load_template("texts")
    quoted = (
        ' "{}"\n',
        " “{}”",
        " „{}“",
        "„{}”",
        '„{}"',
        "« {} »",
        "»{}«",
        "”{}”",
        "「{}」",
        " {}",
    )
    for completion in quoted:
        assert texts.released(completion.format("It is lost.")) == "It is lost."
    # Only the pair around all of it: marks of another kind next to it belong to the text.
    assert texts.released(' "Yes." "No."') == '"Yes." "No."'
    assert texts.released('"„Ja“, said he."') == "„Ja“, said he."
    assert texts.released("“He said «oui»”") == "He said «oui»"
    assert texts.released('“He said "no"”') == 'He said "no"'
    assert texts.released('„He said "no"') == '„He said "no"'
    assert texts.released(' "It is lost. Wh', is_cut=True) == "It is lost."
    path = tmp_path / "own.yaml"
    path.write_text("user: '{text}'\noutput: '({completion})'\n")
    assert load_template(str(path)).released('"x"') == '("x")'


def test_examples_have_a_form_of_their_own_or_an_empty_line_between_them(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    few_shot = FewShot({None: ["one", "{two}"]}, 2)
    for example, shown in (
        ("", "one\n\n{two}\n\n"),
        ("example: '({example}/{label})'", "(one/l)({two}/l)"),
    ):
        path.write_text(f"user: '{{examples}}{{text}}'\n{example}\n")
        template = load_template(str(path), few_shot)
        assert template.private_prompt("x", "l", ["one", "{two}"]).user == shown + "x"


@pytest.mark.parametrize("of_label", [5, 1])
def test_all_prompts_of_a_batch_show_the_same_public_examples(of_label: int) -> None:
    goals = [f"goal {number}" for number in range(of_label)]
    texts: dict[str | None, list[str]] = {None: [*goals, "a war", "a fair"], "Sports": goals}
    template = load_template("agnews_chat", FewShot(texts, 2))
    seen = set()
    for number in range(100):
        shown = template.examples("Sports", f"0/{number}")
        assert shown == template.examples("Sports", f"0/{number}") and len(set(shown)) == 2
        # Where a label has too few of them, all are drawn from.
        assert set(shown) <= set(goals if of_label == 5 else texts[None])
        seen.update(shown)
        for prompt in (
            template.private_prompt("a kick", "Sports", shown),
            template.public_prompt("Sports", shown),
        ):
            assert all(f"Paragraph: {text}\n" in prompt.user for text in shown)
    assert seen == set(goals if of_label == 5 else texts[None])
    assert load_template("agnews_chat").examples("Sports", "0/0") == []


def test_examples_and_terms_that_a_template_does_not_show_are_refused(tmp_path: Path) -> None:
    few_shot = FewShot({None: ["a", "b"]}, 2)
    with pytest.raises(InputError, match=r"yelp: `user` has no \{examples\}, which"):
        load_template("yelp", few_shot)
    own = tmp_path / "own.yaml"
    own.write_text("user: '{examples}{text}{terms}'\npublic: just one")
    with pytest.raises(InputError, match=r"own\.yaml: `public` has no \{examples\}, which"):
        load_template(str(own), few_shot)
    with pytest.raises(InputError, match=r"own\.yaml: `public` has no \{terms\}, which the method"):
        load_template(str(own)).showing({"": [["a"]]})
    assert load_template(str(own)).showing({}) == load_template(str(own))


def test_the_packaged_template_says_what_the_texts_are() -> None:
    about = About("letters of guests", "German", {"1": "praise"})
    template = load_template("texts", about=about)
    prompt = template.private_prompt("Marlowe", "1")
    assert prompt.user.startswith("Here are letters of guests in German of the kind: praise.")
    assert (
        "Text: <one of letters of guests of the kind: praise>" in template.public_prompt("1").user
    )
    bare = load_template("texts").public_prompt("1").user
    assert bare.startswith("Here are texts of the kind: 1.") and "<text of the kind: 1>" in bare
