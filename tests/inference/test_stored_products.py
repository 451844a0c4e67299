"""Products by kernels equal the plain form in torch, for every format, instruction set and number of tokens."""

import multiprocessing

import pytest
import torch

from iobs.inference import activations, cpu
from iobs.inference.formats import FORMATS, store
from iobs.inference.product import StoredProduct

ORDER = {"none": 0, "avx2": 1, "avx512": 2}
LEVELS = ["none", "avx2", "avx512"]
CASES = [(level, name) for level in LEVELS for name in FORMATS]


def require(level):
    if ORDER[level] > ORDER[cpu.level()]:
        pytest.skip(f"this CPU has no {level}")


def sparse(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[torch.rand(rows, columns, generator=generator) < 0.7] = 0
    weight[rows // 2] = 0
    return weight


def round_activations(given):
    """Activations (tokens, columns) rounded to 8 bits, as the kernels of quantised formats do."""
    scales = given.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scales > 0, given / scales, torch.zeros(())).round()
    return codes * scales


def plain(matrix, given, rounds):
    """The product in float64, with activations rounded to 8 bits where the kernel rounds them."""
    activations = round_activations(given) if matrix.quantised and rounds else given
    return activations.double() @ matrix.to_dense().double().t()


@pytest.mark.parametrize(("level", "name"), CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (6, 64), (5, 129), (20, 320), (4, 700)])
def test_products_equal_the_plain_form(level, name, shape):
    require(level)
    matrix = store(sparse(*shape), name)
    for tokens in (1, 2, 3, 4, 7, 16, 21):
        product = StoredProduct(matrix, level, most_tokens=0 if level == "none" else 16)
        given = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens))
        found, wanted = product(given), plain(matrix, given, rounds=level != "none" and tokens <= 16)
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= 2e-5 * (1 + wanted.abs().max())


def rounded_by_kernels(given):
    """Activations in 8 bits as the kernels round them: among many, some lie on a tie of the plain form."""
    codes, scales = torch.empty(given.shape, dtype=torch.uint8), torch.empty(len(given))
    activations.rounded(given.numpy(), codes.numpy(), scales.numpy())
    return (codes.float() - 128) * scales[:, None]


def test_rounding_of_activations_equals_the_plain_form_but_for_ties():
    given = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    apart = (rounded_by_kernels(given) - round_activations(given)).abs() / (given.abs().amax(1, keepdim=True) / 127)
    assert (apart > 1e-3).sum() <= 3
    assert apart.max() <= 1.001


@pytest.mark.parametrize(("level", "name"), [case for case in CASES if case[0] != "none"])
def test_threads_share_the_rows_with_the_same_bits(level, name):
    require(level)
    matrix = store(sparse(37, 200), name)
    given = torch.randn(2, 200, generator=torch.Generator().manual_seed(1))
    one = StoredProduct(matrix, level)(given)
    for threads in (2, 3, 40):
        assert torch.equal(StoredProduct(matrix, level, threads)(given), one)


@pytest.mark.parametrize("level", ["avx2", "avx512"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [5, 70, 200])
def test_unpacked_rows_are_the_dense_rows(level, name, columns):
    require(level)
    matrix = store(sparse(9, columns), name)
    assert torch.equal(StoredProduct(matrix, level).dense(2, 8), matrix.to_dense(2, 8))


@pytest.mark.parametrize(("level", "name"), [case for case in CASES if case[0] != "none"])
def test_the_largest_codes_do_not_overflow(level, name):
    require(level)
    signs = torch.where(torch.randn(300, generator=torch.Generator().manual_seed(0)) < 0, -1.0, 1.0)
    matrix, given = store(signs[None].repeat(3, 1), name), torch.stack([signs, -signs])
    assert (StoredProduct(matrix, level)(given) - plain(matrix, given, rounds=True)).abs().max() < 1e-3


@pytest.mark.parametrize("level", ["avx2", "avx512"])
@pytest.mark.parametrize("name", ["int8", "bitmask-int8"])
def test_a_file_with_the_code_that_we_never_write_is_multiplied_too(level, name):
    require(level)
    matrix, given = store(-torch.ones(2, 130), name), torch.ones(1, 130)
    stored = matrix.tensors["values"]
    matrix.tensors["values"] = torch.where(stored == 129, torch.tensor(128, dtype=torch.uint8), stored)  # -127, -128
    matrix.tensors["corrections"] = 128 * matrix.to_dense().sum(1)
    assert (StoredProduct(matrix, level)(given) - plain(matrix, given, rounds=True)).abs().max() < 1e-3


@pytest.mark.parametrize(("level", "name"), CASES)
def test_activations_of_zero_or_no_tokens(level, name):
    require(level)
    product = StoredProduct(store(sparse(6, 70), name), level)
    assert not product(torch.zeros(1, 70)).any()
    assert product(torch.zeros(0, 70)).shape == (0, 6)


@pytest.mark.parametrize(("level", "name"), CASES)
def test_nan_in_activations_gives_nan_in_the_output(level, name):
    require(level)
    weight = sparse(6, 70) + 1  # no entry is zero
    given = torch.ones(1, 70)
    given[0, 3] = float("nan")
    assert torch.isnan(StoredProduct(store(weight, name), level)(given)).all()


def test_dtype_of_the_output_is_that_of_the_activations():
    product = StoredProduct(store(sparse(6, 70), "bitmask-bf16"))
    for tokens in (1, 20):
        assert product(torch.ones(tokens, 70, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ({"avx512f", "avx512bw", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx2", "fma"}, "avx512"),
        ({"avx512f", "avx2", "fma", "popcnt", "ssse3"}, "avx2"),
        ({"avx2"}, "none"),
        (set(), "none"),
    ],
)
def test_level_follows_the_features_of_the_cpu(features, level):
    assert cpu.level_of(frozenset(features)) == level


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    """The threads of the parent are not there: their work would never be done."""
    if cpu.level() == "none":
        pytest.skip("this CPU has no kernels")
    product, given = StoredProduct(store(sparse(64, 70), "int8"), threads=2), torch.ones(1, 70)
    product(given)
    child = multiprocessing.get_context("fork").Process(target=product, args=(given,))
    child.start()
    child.join(60)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0
