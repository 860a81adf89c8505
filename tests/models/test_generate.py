from __future__ import annotations

import pytest
import scipy.stats
import torch

from tests.models.reference import TINY, VARIANTS, random_decoder, reference_of
from torchtitan.base.errors import UserError
from torchtitan.models.generate import generate

PROMPT = [5, 200, 17, 17, 3]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_the_public_models_and_that_without_a_cache(variant):
    model = random_decoder(VARIANTS[variant])
    ids = generate(model, PROMPT, max_new_tokens=40, temperature=0)
    expected = reference_of(model).generate(
        torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    assert PROMPT + ids == expected[0].tolist()
    uncached = list(PROMPT)
    for _ in range(40):
        uncached.append(int(model(torch.tensor([uncached]))[0, -1].argmax()))
    assert PROMPT + ids == uncached
    assert len(set(ids)) > 5


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    model = random_decoder(TINY)
    before = torch.get_rng_state()
    first, again, other = (
        generate(model, PROMPT, max_new_tokens=20, seed=seed) for seed in (3, 3, 4)
    )
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())


def test_text_ends_at_the_end_token_and_keeps_it():
    model = random_decoder(TINY)
    ids = generate(model, PROMPT, max_new_tokens=20, temperature=0)
    assert (
        generate(model, PROMPT, max_new_tokens=20, temperature=0, eos_id=ids[4])
        == (ids[: ids.index(ids[4]) + 1])
    )


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (2.0, None), (1.5, 6), (1.0, 1)])
def test_draws_follow_the_models_distribution(temperature, top_k):
    model = random_decoder(TINY)
    logits = model(torch.tensor([PROMPT]))[0, -1].detach().double() / temperature
    kept = logits.topk(top_k or 263).indices
    expected = torch.zeros(263, dtype=torch.float64)
    expected[kept] = logits[kept].softmax(0)
    drawn = [
        generate(model, PROMPT, max_new_tokens=1, temperature=temperature, top_k=top_k, seed=s)[0]
        for s in range(600)
    ]
    counts = torch.bincount(torch.tensor(drawn), minlength=263).double()
    assert counts[expected == 0].sum() == 0
    common = expected * 600 >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).numpy()
    predicted = torch.cat([expected[common], expected[~common].sum()[None]]).numpy() * 600
    used = predicted > 0
    if used.sum() > 1:
        assert scipy.stats.chisquare(observed[used], predicted[used]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "at least one token"),
        ({"prompt_ids": [1, 263]}, r"0\.\.262"),
        ({"prompt_ids": [-1]}, r"0\.\.262"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_settings_without_a_meaning_are_refused(change, message):
    settings = {"prompt_ids": PROMPT, "max_new_tokens": 4} | change
    with pytest.raises(UserError, match=message):
        generate(random_decoder(TINY), **settings)
