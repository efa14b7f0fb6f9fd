# docker build -f deploy/docker/device-plugin.Dockerfile -t ghcr.io/gpushare/gpushare-device-plugin:0.1.0 .
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked -p device-plugin --bin gpushare-device-plugin \
    && cp target/dist/gpushare-device-plugin /gpushare-device-plugin

# An image with glibc: the plugin loads libnvidia-ml, which the node's NVIDIA runtime mounts.
FROM gcr.io/distroless/cc-debian12:latest
LABEL org.opencontainers.image.title="gpushare-device-plugin" \
      org.opencontainers.image.description="kubelet device plugin that shares GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /gpushare-device-plugin /usr/local/bin/gpushare-device-plugin
# Root, because kubelet's socket directory belongs to root.
USER 0:0
ENTRYPOINT ["/usr/local/bin/gpushare-device-plugin"]
