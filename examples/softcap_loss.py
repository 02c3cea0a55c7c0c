"""Gemma 2's head: logits z = cap · tanh(x · wᵀ / cap) and each row's loss ln Σⱼ exp(zⱼ − z_target).

x [..., K], w [V, K], target [...]; returns z [..., V] and the loss [..., 1]. Forward keeps no
softmax: backward computes exp(z − ln Σ exp z) from the logits and one number a row.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


@cz.epilogue
def softcap_loss(acc, target, cap=30.0):  # acc [M, V], target [M, 1]
    logits = L.softcap(acc, cap)
    loss = L.logsumexp(logits, L.pick(logits, target))
    return {"logits": logits, "loss": loss}


def main() -> None:
    """Compares with PyTorch's cross-entropy, and the gradients with `plain`."""
    x = torch.randn(4, 16, 32, requires_grad=True)
    w = torch.randn(50, 32, requires_grad=True)
    target = torch.randint(0, 50, (4, 16))

    result = softcap_loss(x, w, target=target)
    logits = 30.0 * torch.tanh(F.linear(x, w) / 30.0)
    torch.testing.assert_close(result["logits"], logits)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    torch.testing.assert_close(result["loss"].flatten(), expected, rtol=1e-4, atol=1e-4)

    derived = torch.autograd.grad(result["loss"].mean(), (x, w))
    again = softcap_loss.plain(x, w, target=target)
    plain = torch.autograd.grad(again["loss"].mean(), (x, w))
    torch.testing.assert_close(derived, plain, rtol=1e-4, atol=1e-4)
    print(f"softcap_loss: mean loss {result['loss'].mean():.3f}, equal to PyTorch's cross-entropy")


if __name__ == "__main__":
    main()
