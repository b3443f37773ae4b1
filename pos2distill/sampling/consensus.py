"""The choice among several responses to one prompt: minimum Bayes risk, as in SeaLong (arXiv:2411.08147)."""

from collections.abc import Sequence

from pos2distill.tasks.metrics import normalize, word_f1


def most_consistent(texts: Sequence[str]) -> int:
    """The index of the text that agrees most with the others; the first one if several agree equally.

        argmax_i 1 / (N - 1) sum_{j != i} F1(text_i, text_j)

    Minimum Bayes risk with risk 1 - F1, where the samples stand for the distribution of correct answers. F1 is computed
    on normalized words (SQuAD). The paper compares texts by a sentence embedding instead, which needs a second model.
    An empty text agrees with no other text.
    """
    words = [normalize(text).split() for text in texts]
    agreement = [0.0] * len(texts)
    for one in range(len(texts)):
        for other in range(one):
            shared = word_f1(words[one], words[other])
            agreement[one] += shared
            agreement[other] += shared
    return agreement.index(max(agreement))
