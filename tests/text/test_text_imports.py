import subprocess
import sys


def test_importing_the_folder_loads_no_heavy_library():
    heavy = "{'torch', 'tokenizers', 'datasets', 'pydoc_data'}"
    check = f"import sys, keyhole.text; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
