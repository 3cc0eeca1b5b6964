"""How far a student is from its teacher, as means over rows.

softmax    T^2 KL(softmax(t / T) || softmax(s / T))               Hinton et al. 2015, section 2
sigmoid    the same, summed over labels that stand alone
values     |s - t|^2 over the mean of |t|^2: of unit vectors 2 (1 - cosine)
           where widths differ, the same of the cosines of all pairs in the batch
attention  KL(t || s) of each query, mean over heads              Wang et al. 2020, MiniLM
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["Kind", "agreement", "attention_loss", "output_loss"]

Kind = Literal["softmax", "sigmoid", "values"]


def output_loss(student: Tensor, teacher: Tensor, kind: Kind, temperature: float = 1.0) -> Tensor:
    """Of rows [N, D]; values may differ in width."""
    student, teacher = _comparable(student.float(), teacher.float(), kind)
    if kind == "values":
        return (student - teacher).square().sum(dim=-1).mean() / teacher.square().sum(dim=-1).mean().clamp_min(1e-12)
    if kind == "sigmoid":  # sigmoid(x) is the softmax of x and 0
        student, teacher = (torch.stack((x, torch.zeros_like(x)), dim=-1) for x in (student, teacher))
    log_s, log_t = ((x / temperature).log_softmax(dim=-1) for x in (student, teacher))
    return temperature**2 * nn.functional.kl_div(log_s, log_t, reduction="sum", log_target=True) / len(student)


def attention_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Of weights [B, H, T, S] at the real queries of mask [B, T]; keys that a query doesn't see weigh nothing."""
    floor = torch.finfo(torch.float32).tiny
    log_s, log_t = (x.float().clamp_min(floor).log() for x in (student, teacher))
    return (teacher * (log_t - log_s)).sum(dim=-1).mean(dim=1)[mask != 0].mean()


def agreement(student: Tensor, teacher: Tensor, kind: Kind) -> Tensor:
    """Of rows [N, D]: the share with the same label, the share of the same labels, or the mean cosine."""
    student, teacher = _comparable(student.float(), teacher.float(), kind)
    if kind == "softmax":
        return (student.argmax(dim=-1) == teacher.argmax(dim=-1)).float().mean()
    if kind == "sigmoid":
        return ((student > 0) == (teacher > 0)).float().mean()
    return nn.functional.cosine_similarity(student, teacher, dim=-1).mean()


def _comparable(student: Tensor, teacher: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """The rows, or where their widths differ the cosines between them: [N, N]."""
    if kind != "values" or student.shape[-1] == teacher.shape[-1]:
        return student, teacher
    units = [nn.functional.normalize(x, dim=-1) for x in (student, teacher)]
    return units[0] @ units[0].T, units[1] @ units[1].T
