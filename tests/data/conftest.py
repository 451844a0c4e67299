import zipfile

import pytest


@pytest.fixture
def make_set(tmp_path):
    """Function that makes a folder of small images and its zip file; names that end with "/" are empty folders."""
    image = pytest.importorskip("PIL.Image")

    def make(*names):
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            for name in names:
                file = tmp_path / "set" / name
                (file if name.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
                if not name.endswith("/"):
                    image.new("RGB", (4, 4)).save(tmp_path / "a.png")
                    file.write_bytes((tmp_path / "a.png").read_bytes())
                archive.write(file, name)
        return [tmp_path / "set", tmp_path / "set.zip"]

    return make
