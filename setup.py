"""What pyproject.toml cannot say: conf/ is in the wheel as kvlab/conf.

The explicit mapping also makes an editable install find packages by name instead of putting src/ on sys.path, where
`import run` would find the script of that name.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("src"), "kvlab.conf", "hydra_plugins"],
    package_dir={"": "src", "kvlab.conf": "conf"},
    package_data={
        "kvlab": [
            *("py.typed", "kernels/cpu/*.cpp", "kernels/cpu/*.hpp", "simulation/*.csv", "models/*.txt"),
            *("workloads/*.jsonl", "server/*.html", "**/*.j2", "**/*.json", "**/*.yaml"),
        ],
        "kvlab.conf": ["**/*.yaml"],
    },
)
