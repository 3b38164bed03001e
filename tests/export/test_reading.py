import threading
import time

import numpy as np
import pytest
from PIL import Image

from dsimg.preprocess import Preprocess
from dsimg_export import reading
from dsimg_export.reading import read_batches

PLAIN = Preprocess(input_size=(3, 4, 4), mean=(0, 0, 0), std=(1, 1, 1), crop_pct=1.0)


def write_files(folder, count, *, bad=()):
    """Write images of 4 x 4 whose grey is their number; return their paths."""
    files = [folder / f"{number:03}.png" for number in range(count)]
    for number, file in enumerate(files):
        if number in bad:
            file.write_bytes(b"no image")
        else:
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(file)
    return files


@pytest.mark.parametrize("threads", [1, 3, None])
@pytest.mark.parametrize("batch_size", [1, 5, 8, 20, 100])
def test_every_file_comes_once_and_in_order(tmp_path, batch_size, threads):
    found = list(read_batches(write_files(tmp_path, 20), PLAIN, batch_size=batch_size, threads=threads))
    assert [len(ids) for ids, _, _ in found] == [min(batch_size, 20 - at) for at in range(0, 20, batch_size)]
    assert np.concatenate([ids for ids, _, _ in found]).tolist() == list(range(20))
    for ids, pixels, bad in found:
        assert pixels.shape == (len(ids), 4, 4, 3)
        assert pixels.dtype == np.uint8
        assert (pixels == ids[:, None, None, None]).all()
        assert bad == {}


@pytest.mark.parametrize("bad", [{0}, {7, 8, 19}, set(range(20))])
def test_files_that_cannot_be_read_are_left_out_and_named(tmp_path, bad):
    files = write_files(tmp_path, 20, bad=bad)
    files[max(bad)].unlink()
    found = list(read_batches(files, PLAIN, batch_size=6, threads=2))
    ids = np.concatenate([ids for ids, _, _ in found]).tolist()
    assert ids == [number for number in range(20) if number not in bad]
    assert all((pixels == ids[:, None, None, None]).all() for ids, pixels, _ in found)
    reasons = [reasons for _, _, reasons in found]
    assert sum(map(len, reasons)) == len(bad)
    merged = {place: reason for part in reasons for place, reason in part.items()}
    assert merged.keys() == bad
    assert merged[max(bad)] == "cannot be read: No such file or directory"


def test_no_files_are_no_batches():
    assert list(read_batches([], PLAIN, batch_size=4)) == []


def test_decoding_runs_a_few_batches_ahead_and_no_further(tmp_path, monkeypatch):
    started = []
    real = reading.read_pixels

    def read_pixels(files, preprocess):
        started.extend(files)
        return real(files, preprocess)

    monkeypatch.setattr(reading, "read_pixels", read_pixels)
    batches = read_batches(write_files(tmp_path, 200), PLAIN, batch_size=8, threads=2)
    next(batches)
    time.sleep(0.2)  # time enough for all of them, were there no bound
    assert len(started) <= 8 * (2 * 2 + 1)
    batches.close()
    assert len(started) <= 8 * (2 * 2 + 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]
