"""Models and optimizers of the published measurements that no installed library has any more.

Written from the descriptions of their authors; what matters here is which tensors they make and
keep, so initial values are left out.
"""

import torch
from torch import nn
from torch.nn import functional as F

# --- GPT-2 of the book "Build a Large Language Model (From Scratch)" -----------------------


class TeachingLayerNorm(nn.Module):
    """Layer normalisation from elementary operations."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class TeachingGelu(nn.Module):
    """GELU by its approximation with tanh, from elementary operations."""

    def forward(self, x):
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class TeachingAttention(nn.Module):
    """Causal attention with all scores in memory.

    stored_mask: the mask is a float buffer [tokens, tokens] in every layer, not made when needed.
    """

    def __init__(self, width: int, heads: int, tokens: int, dropout: float, stored_mask: bool):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        mask = torch.triu(torch.ones(tokens, tokens), diagonal=1) if stored_mask else None
        self.register_buffer("mask", mask)

    def forward(self, x):
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, self.head_width)
        key, query, value = self.key(x), self.query(x), self.value(x)
        key, query, value = (t.view(shape).transpose(1, 2) for t in (key, query, value))
        scores = query @ key.transpose(2, 3)
        mask = self.mask
        if mask is None:
            mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1)
        scores.masked_fill_(mask.bool()[:tokens, :tokens], -torch.inf)
        weights = torch.softmax(scores / self.head_width**0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ value).transpose(1, 2).reshape(batch, tokens, width)
        return self.projection(context)


class FlashCausalAttention(nn.Module):
    """Causal attention by torch's `scaled_dot_product_attention`, one projection for all three."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )
        return self.projection(context.transpose(1, 2).contiguous().view(batch, tokens, width))


class TeachingBlock(nn.Module):
    """Attention and feed-forward network, each normalised before and added to its input."""

    def __init__(self, attention: nn.Module, width: int, dropout: float, torch_layers: bool):
        super().__init__()
        norm = nn.LayerNorm if torch_layers else TeachingLayerNorm
        gelu = nn.GELU(approximate="tanh") if torch_layers else TeachingGelu()
        self.attention = attention
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width)
        )
        self.norm1, self.norm2 = norm(width), norm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.dropout(self.attention(self.norm1(x))) + x
        return self.dropout(self.feed_forward(self.norm2(x))) + x


class TeachingGpt2(nn.Module):
    """GPT-2 of 124 million parameters with an output layer of its own (163 million in all).

    torch_layers: torch's LayerNorm and GELU and, with `flash`, its attention. Input: token ids
    [batch, tokens]; output: logits [batch, tokens, vocabulary].
    """

    def __init__(self, stored_mask: bool = True, torch_layers: bool = False, flash: bool = False):
        super().__init__()
        vocabulary, tokens, width, heads, layers, dropout = 50_257, 1024, 768, 12, 12, 0.1
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                TeachingBlock(
                    FlashCausalAttention(width, heads, dropout)
                    if flash
                    else TeachingAttention(width, heads, tokens, dropout, stored_mask),
                    width,
                    dropout,
                    torch_layers,
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width) if torch_layers else TeachingLayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(self.tokens(ids) + positions)
        return self.output(self.norm(self.blocks(x)))


# --- Pyramid Vision Transformer, version 1, Tiny (Wang et al. 2021, arXiv:2102.12122) ------


class DropPath(nn.Module):
    """Leave out a residual branch for some samples (stochastic depth)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0:
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x.div(1 - self.p) * (1 - self.p + keep).floor_()


class ReducedAttention(nn.Module):
    """Attention whose keys and values come from a feature map reduced `reduction` times."""

    def __init__(self, width: int, heads: int, reduction: int):
        super().__init__()
        self.heads, self.reduction = heads, reduction
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.projection = nn.Linear(width, width)
        if reduction > 1:
            self.reduce = nn.Conv2d(width, width, kernel_size=reduction, stride=reduction)
            self.norm = nn.LayerNorm(width)

    def forward(self, x, height: int, columns: int):
        batch, tokens, width = x.shape
        head_width = width // self.heads
        query = self.query(x).reshape(batch, tokens, self.heads, head_width).permute(0, 2, 1, 3)
        source = x
        if self.reduction > 1:
            source = self.reduce(x.permute(0, 2, 1).reshape(batch, width, height, columns))
            source = self.norm(source.reshape(batch, width, -1).permute(0, 2, 1))
        key_value = self.key_value(source).reshape(batch, -1, 2, self.heads, head_width)
        key, value = key_value.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-2, -1)) * head_width**-0.5
        context = scores.softmax(dim=-1) @ value
        return self.projection(context.transpose(1, 2).reshape(batch, tokens, width))


class PyramidBlock(nn.Module):
    def __init__(self, width: int, heads: int, mlp_ratio: int, reduction: int, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = ReducedAttention(width, heads, reduction)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        hidden = width * mlp_ratio
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.drop_path = DropPath(drop_path)

    def forward(self, x, height: int, columns: int):
        x = x + self.drop_path(self.attention(self.norm1(x), height, columns))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PvtTiny(nn.Module):
    """Four stages of two blocks on ever smaller maps; images [batch, 3, 224, 224] to logits."""

    def __init__(self, classes: int = 1000, drop_path: float = 0.1):
        super().__init__()
        widths, heads, ratios = (64, 128, 320, 512), (1, 2, 5, 8), (8, 8, 4, 4)
        drop_paths = [drop_path * block / 7 for block in range(8)]
        self.patches, self.norms = nn.ModuleList(), nn.ModuleList()
        self.positions, self.stages = nn.ParameterList(), nn.ModuleList()
        channels, side = 3, 224
        for stage, (width, head, ratio) in enumerate(zip(widths, heads, ratios, strict=True)):
            patch = 4 if stage == 0 else 2
            side //= patch
            self.patches.append(nn.Conv2d(channels, width, kernel_size=patch, stride=patch))
            self.norms.append(nn.LayerNorm(width))
            is_last = stage == len(widths) - 1
            self.positions.append(nn.Parameter(torch.zeros(1, side**2 + is_last, width)))
            self.stages.append(
                nn.ModuleList(
                    PyramidBlock(width, head, ratio, 8 >> stage, drop_paths[2 * stage + block])
                    for block in range(2)
                )
            )
            channels = width
        self.class_token = nn.Parameter(torch.zeros(1, 1, widths[-1]))
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images):
        x, batch = images, len(images)
        layers = zip(self.patches, self.norms, self.positions, self.stages, strict=True)
        for stage, (patch, norm, positions, blocks) in enumerate(layers):
            x = patch(x)
            height, columns = x.shape[-2:]
            x = norm(x.flatten(2).transpose(1, 2))
            is_last = stage == len(self.stages) - 1
            if is_last:
                x = torch.cat((self.class_token.expand(batch, -1, -1), x), dim=1)
            x = x + positions
            for block in blocks:
                x = block(x, height, columns)
            if not is_last:
                x = x.reshape(batch, height, columns, -1).permute(0, 3, 1, 2).contiguous()
        return self.head(self.norm(x)[:, 0])


# --- Nine small layers: the model of a test for checkpointing with offload -----------------


def small_layers() -> nn.Sequential:
    """Three groups of three linear layers; input [..., 4], output [..., 2]."""
    widths = ((4, 4, 4, 8), (8, 4, 4, 4), (4, 6, 8, 2))
    return nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(a, b) for a, b in zip(group, group[1:], strict=False)))
            for group in widths
        )
    )


# --- Optimizers ----------------------------------------------------------------------------


class TransformersAdamW(torch.optim.Optimizer):
    """The AdamW that transformers had before version 5: a loop, one temporary a parameter."""

    def __init__(self, params, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter)
                grad = parameter.grad
                state["mean"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["square"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = state["square"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["mean"], root, value=-group["lr"])


class TransformersAdafactor(torch.optim.Optimizer):
    """Adafactor (arXiv:1804.04235) as transformers' Trainer sets it: no first moment.

    Matrices keep a mean square for every row and column, vectors one for every element.
    """

    def __init__(self, params, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group["lr"])

    def _update(self, parameter, grad, state, lr: float) -> None:
        factored = grad.dim() >= 2
        if not state:
            if factored:
                state["row"] = torch.zeros(grad.shape[:-1])
                state["column"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:])
            else:
                state["square"] = torch.zeros_like(grad)
        update = (grad**2) + 1e-30
        if factored:
            state["row"].mul_(0.99).add_(update.mean(dim=-1), alpha=0.01)
            state["column"].mul_(0.99).add_(update.mean(dim=-2), alpha=0.01)
            row = state["row"] / state["row"].mean(dim=-1, keepdim=True)
            row = row.rsqrt_().unsqueeze(-1)
            update = torch.mul(row, state["column"].unsqueeze(-2).rsqrt())
            update.mul_(grad)
        else:
            state["square"].mul_(0.99).add_(update, alpha=0.01)
            update = state["square"].rsqrt().mul_(grad)
        root_mean_square = update.norm(2) / update.numel() ** 0.5
        update.div_(root_mean_square.clamp_(min=1.0))
        update.mul_(lr)
        parameter.add_(-update)


class Adam8bit(torch.optim.Optimizer):
    """Adam with both moments in a byte each (arXiv:2110.02861), of which only sizes matter here.

    Every block of 2,048 values has a float32 scale; tensors below 4,096 values stay in float32.
    The update is one kernel without temporaries.
    """

    def __init__(self, params, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None and not state:
                    self._make_state(parameter, state)

    def _make_state(self, parameter, state) -> None:
        count = parameter.numel()
        for moment in ("mean", "square"):
            if count < 4096:
                state[moment] = torch.zeros_like(parameter)
                continue
            state[moment] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{moment} scales"] = torch.zeros(-(-count // 2048))
        if count >= 4096 and not any("levels" in other for other in self.state.values()):
            state["levels"] = torch.zeros(256)
            state["square levels"] = torch.zeros(256)
