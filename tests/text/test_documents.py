import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.core.errors import InputError
from keyhole.text import Corpus, documents


def cut(text: str, rows: str) -> list[str]:
    return documents(Corpus("here", (text,)), rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("It cost 3.50 dollars. He paid.", ["It cost 3.50 dollars.", "He paid."]),
        ("Mr. Adams met Dr. Brown. They spoke.", ["Mr. Adams met Dr. Brown.", "They spoke."]),
        ("The U.S. Congress met. It voted.", ["The U.S. Congress met.", "It voted."]),
        ("See No. 5 and No. VI of it. Then go.", ["See No. 5 and No. VI of it.", "Then go."]),
        ("J. Q. Adams and I. He left.", ["J. Q. Adams and I.", "He left."]),
        ("The answer is no! No. 7 was right.", ["The answer is no!", "No. 7 was right."]),
        ('He said "Stop!" Then he left. "Why?" she asked.', ['He said "Stop!"', "Then he left.", '"Why?" she asked.']),
        ("“It ends.” “It does not.”", ["“It ends.”", "“It does not.”"]),
        ("so it was, e.g. in March. in lower case. Über alles.", None),
        ("A heading\n\nA sentence\nover two lines. Next.", ["A heading", "A sentence over two lines.", "Next."]),
        ("Wait... What? (Really.) Yes.", ["Wait...", "What?", "(Really.)", "Yes."]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text, expected):
    expected = expected or ["so it was, e.g. in March. in lower case.", "Über alles."]
    assert cut(text, "sentences") == expected


def test_paragraphs_are_cut_at_blank_lines_and_lines_at_line_ends():
    text = "\n\na\nb\n \t\n\nc \n"
    assert cut(text, "paragraphs") == ["a\nb", "c"]
    assert cut(text, "lines") == ["a", "b", "c"]
    assert cut(text, "files") == ["a\nb\n \t\n\nc"]


def test_no_document_spans_two_files():
    corpus = Corpus("here", ("Begun here", "ended there."))
    assert documents(corpus, "sentences") == ["Begun here", "ended there."]
    assert documents(corpus, "files") == ["Begun here", "ended there."]
    assert documents(corpus, "text") == ["Begun here\n\nended there."]


@given(st.text(alphabet="aB .!?\n\"'”(No1", max_size=80), st.sampled_from(["lines", "sentences", "paragraphs", "files"]))
def test_cutting_keeps_every_word_in_order_and_leaves_nothing_empty(text, rows):
    pieces = cut(text, rows)
    assert all(piece.strip() for piece in pieces)
    assert " ".join(pieces).split() == text.split()


def test_another_way_to_cut_is_refused():
    with pytest.raises(InputError, match=r"rows = 'line' is no way to cut a text; did you mean 'lines'"):
        cut("text", "line")
