# docker build -f deploy/docker/scheduler.Dockerfile -t ghcr.io/gpushare/gpushare-scheduler:0.1.0 .
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked -p scheduler --bin gpushare-scheduler \
    && cp target/dist/gpushare-scheduler /gpushare-scheduler

FROM gcr.io/distroless/cc-debian12:nonroot
LABEL org.opencontainers.image.title="gpushare-scheduler" \
      org.opencontainers.image.description="kube-scheduler extender that shares GPUs per device" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /gpushare-scheduler /usr/local/bin/gpushare-scheduler
# A number, so that kubelet can check that it is not root.
USER 65532:65532
EXPOSE 12345
ENTRYPOINT ["/usr/local/bin/gpushare-scheduler"]
