"""How far two sets of texts are from one another, by the embeddings of a frozen encoder."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from doppler_hf.mean_pooling import masked_mean

MAX_TOKENS: Final = 128
TOGETHER: Final = 128
# Of the frontier: the scale of divergences, and how many mixtures are tried (Pillutla et al., MAUVE, NeurIPS 2021).
SCALE: Final = 5.0
MIXTURES: Final = 99


class Encoder:
    """A frozen encoder, which gives each text a vector of length 1: the direction of the mean of its token vectors."""

    def __init__(self, name: str) -> None:
        self._tokenizer, self._model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of some texts, shape (texts, hidden)."""
        tokens = self._tokenizer([*texts], truncation=True, max_length=MAX_TOKENS, return_attention_mask=False)["input_ids"]
        found = np.empty((len(tokens), self._model.config.hidden_size), dtype=np.float32)
        # Texts of about one length together need little padding.
        rows = np.argsort([len(each) for each in tokens], kind="stable")
        for some in np.split(rows, range(TOGETHER, len(rows), TOGETHER)):
            batch = self._tokenizer.pad({"input_ids": [tokens[row] for row in some]}, return_tensors="pt")
            with torch.inference_mode():
                hidden = self._model(**batch).last_hidden_state
                found[some] = F.normalize(masked_mean(hidden, batch["attention_mask"])).numpy()
        return found


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Fréchet distance of two normal distributions with the means and covariances of two sets of vectors.

    It is ‖μ₁ - μ₂‖² + tr(Σ₁ + Σ₂ - 2 (Σ₁ Σ₂)^½).
    """
    covariances = [np.cov(each.astype(np.float64), rowvar=False) for each in (first, second)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    # The eigenvalues of Σ₁ Σ₂ are those of the symmetric matrix Σ₁^½ Σ₂ Σ₁^½.
    mixed = np.sqrt(np.linalg.eigvalsh(root @ covariances[1] @ root).clip(0)).sum()
    means = np.square(first.mean(0, dtype=np.float64) - second.mean(0, dtype=np.float64)).sum()
    return float(means + sum(map(np.trace, covariances)) - 2 * mixed)


def frontier_area(first: np.ndarray, second: np.ndarray, *, clusters: int, seed: int) -> float:
    """Return the area under the frontier of divergences between two sets of vectors: 1 if they are alike, 0 if apart.

    Both sets are divided into clusters together, as MAUVE does, and the frequencies of the clusters are compared.
    """
    from sklearn.cluster import KMeans

    places = KMeans(clusters, n_init=1, random_state=seed).fit_predict(np.concatenate([first, second]))
    counts = [np.bincount(each, minlength=clusters) for each in np.split(places, [len(first)])]
    return area(*(each / each.sum() for each in counts))


def area(p: np.ndarray, q: np.ndarray) -> float:
    """Return the area under the curve of exp(-c KL(q ‖ r)) and exp(-c KL(p ‖ r)), over mixtures r of p and q."""
    points = [(0.0, 1.0), (1.0, 0.0)]
    for weight in np.linspace(0, 1, MIXTURES + 2)[1:-1]:
        mixture = weight * p + (1 - weight) * q
        points.append((np.exp(-SCALE * divergence(q, mixture)), np.exp(-SCALE * divergence(p, mixture))))
    # With more of p in the mixture the first coordinate falls and the second rises.
    across, up = np.array(sorted(points, key=lambda point: (point[0], -point[1]))).T
    return float(np.trapezoid(up, across))


def divergence(p: np.ndarray, r: np.ndarray) -> float:
    """Return KL(p ‖ r) for an r that is positive wherever p is."""
    some = p > 0
    return float((p[some] * np.log(p[some] / r[some])).sum())


def share_nearer(texts: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """Return the share of vectors of length 1 whose nearest neighbour in the first set is nearer than in the second.

    A neighbour in both counts half.
    """
    nearest = [(texts @ each.T).max(1) for each in (first, second)]
    # Equal texts may differ in the last digits, since they were padded differently.
    gap = nearest[0] - nearest[1]
    return float((gap > 1e-5).mean() + (abs(gap) <= 1e-5).mean() / 2)
