"""Lets torchvision's published wheel, built for CUDA, import beside a CPU build of torch.

Its compiled library does not load there, so its operators are missing, and torchvision registers fake kernels for two
of them whenever it is imported. Declaring the two is enough: SGLang needs the import, and nothing ever calls them."""

_libraries = []  # torch drops the declarations of a library that is collected


def declare_torchvision_ops() -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        return  # the real operators load there; a second declaration would break them
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
