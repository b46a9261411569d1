"""Named tensors, in memory, in files and in live modules."""

import concurrent.futures

import pytest
import torch

from squisher.errors import SquisherError
from squisher.names import live_parameters
from squisher.storage import safetensors as archive
from squisher.storage import tensors
from squisher.storage.safetensors import open_safetensors
from squisher.storage.tensors import (
    CHUNK,
    Computed,
    LazyTensors,
    chunks_of,
    filled,
    numel_of,
    one_thread,
    recut,
    tied_names,
)


def test_chunks_of_a_plain_dict_and_of_a_file_have_the_same_borders(tmp_path):
    tensors = {"a": torch.rand(1000)}
    archive.save(tmp_path / "a.safetensors", tensors, {})
    lazy, _ = archive.open_archive(tmp_path / "a.safetensors")
    sizes = [[p.numel() for p in chunks_of(source, "a", 300)] for source in (tensors, lazy)]
    assert sizes == [[300, 300, 300, 100]] * 2
    assert numel_of(lazy, "a") == 1000


def test_tied_names_in_memory_and_on_disk(tmp_path):
    weight = torch.rand(4, 4)
    tensors = {
        "first": weight,
        "second": weight,
        "other": torch.rand(4, 4),
        "transposed": weight.t(),
        "empty": torch.empty(0),
    }
    assert tied_names(tensors) == {"second": "first"}
    archive.save(tmp_path / "a.safetensors", tensors, {})
    assert tied_names(open_safetensors(tmp_path / "a.safetensors")) == {}


def test_a_missing_name_says_what_is_near():
    lazy = LazyTensors({"layer.weight": None})
    with pytest.raises(KeyError, match=r"Did you mean 'layer.weight'"):
        lazy["layer.wieght"]


def test_live_parameters_are_named_as_their_weight_file_names_them():
    class DistributedDataParallel(torch.nn.Module):  # by the name of its class, as the real one is recognised
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    inner = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "twin": torch.nn.Linear(2, 2)})
    inner["twin"].weight = inner["module"].weight
    found = live_parameters(DistributedDataParallel(inner))
    assert [p.name for p in found] == ["module.weight", "module.bias", "twin.bias"]
    assert found[0].aliases == ("twin.weight",)
    assert found[0].live_name == "module.module.weight"
    assert [p.name for p in found] == [n for n in inner.state_dict() if n != "twin.weight"]


def test_adapters_are_named_as_peft_writes_them():
    from squisher.names import adapter_file_name

    for live, file in {
        "base_model.model.q.lora_A.default.weight": "base_model.model.q.lora_A.weight",
        "base_model.model.q.lora_magnitude_vector.default.weight": "base_model.model.q.lora_magnitude_vector",
        "base_model.model.score.modules_to_save.default.weight": "base_model.model.score.weight",
        "base_model.model.wte.lora_embedding_A.my_task": "base_model.model.wte.lora_embedding_A",
    }.items():
        assert adapter_file_name(live) == file


def test_one_thread_is_put_back_also_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="inside"), one_thread():
        assert torch.get_num_threads() == 1
        raise RuntimeError("inside")
    assert torch.get_num_threads() == before


def test_tensors_that_are_computed_when_asked_for_are_not_tied_by_a_recycled_address():
    class Computed(dict):
        def __getitem__(self, name):
            return torch.zeros(1000) + len(name)

    class Lazy(Computed):
        tied = {"bbb": "a"}  # noqa: RUF012

        def chunks(self, name, size):
            yield self[name]

    names = dict.fromkeys(["a", "bb", "bbb", "cccc"])
    assert tied_names(Computed(names)) == {}
    assert tied_names(Lazy(names)) == {"bbb": "a"}


def test_a_piece_that_somebody_holds_is_never_overwritten_and_its_memory_is_used_again_afterwards():
    first = tensors.buffer_for(1 << 17, torch.float32).fill_(1.0)
    view = first[10:20].numpy()  # holds the memory, though the tensor goes
    place = first.data_ptr()
    del first
    others = [tensors.buffer_for(1 << 17, torch.float32).fill_(k) for k in range(2, 60)]
    assert all(bool((t == k).all()) for k, t in enumerate(others, 2))
    assert len({t.data_ptr() for t in others}) == len(others)
    assert (view == 1.0).all()
    assert place not in {t.data_ptr() for t in others}
    del view, others
    again = [tensors.buffer_for(1 << 17, torch.bfloat16) for _ in range(40)]
    assert place in {t.data_ptr() for t in again}
    assert len({t.data_ptr() for t in again}) == len(again)


def test_room_of_other_sizes_is_plain_memory():
    for numel in (0, 1, 1 << 24):
        room = tensors.buffer_for(numel, torch.float32)
        assert room.shape == (numel,)
        assert room.dtype == torch.float32


def test_threads_never_share_a_room():
    def work(number):
        for _ in range(300):
            mine = tensors.buffer_for(1 << 16, torch.float64)
            mine.fill_(number)
            if not bool((mine == number).all()):
                return False
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_computed_tensors_take_names_shapes_and_types_from_another_mapping():
    class Doubled(Computed):
        def chunks(self, name, size=CHUNK):
            return (2 * piece for piece in chunks_of(self._like, self._name_there(name), size))

    stored = {"a": torch.arange(6).view(2, 3), "b": torch.zeros(0, 4), "c": torch.ones(2)}
    doubled = Doubled(stored)
    assert list(doubled) == list(stored)
    assert torch.equal(doubled["a"], 2 * stored["a"])
    assert doubled["b"].shape == (0, 4)
    assert [doubled.dtype(n) for n in doubled] == [torch.int64, torch.float32, torch.float32]
    renamed = Computed(stored, {"x": "a"})
    assert (list(renamed), len(renamed), "a" in renamed, renamed.shape("x")) == (["x"], 1, False, (2, 3))
    assert torch.equal(renamed["x"], stored["a"])
    with pytest.raises(KeyError, match="no tensor named 'a'"):
        renamed["a"]


@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 7], [4, 4, 4], [0, 3, 0, 9, 0], []])
@pytest.mark.parametrize("size", [1, 4, 5, 12, 100])
def test_chunks_are_recut_and_joined(cuts, size):
    numel = sum(cuts)
    values = torch.arange(numel)
    chunks = list(recut(values.split(cuts), size)) if cuts else list(recut([], size))
    assert [chunk.numel() for chunk in chunks] == [size] * (numel // size) + [numel % size] * (numel % size > 0)
    assert torch.equal(filled(chunks, (numel, 1), torch.int64), values.view(-1, 1))


@pytest.mark.parametrize("chunks", [[], [torch.ones(3)], [torch.ones(3), torch.ones(2)]])
def test_chunks_that_end_early_make_no_tensor(chunks):
    with pytest.raises(SquisherError, match="6 entries"):
        filled(chunks, (2, 3), torch.float32)
